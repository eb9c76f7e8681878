"""Callers and their permissions: certificates, tokens and roles.

In: a caller's certificate or token. Out: the caller with its roles, or a refusal. `role_gate`
checks each call against the table in `roles`.
"""
