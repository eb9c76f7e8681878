"""Callers and their permissions: certificates, tokens and roles.

In: a caller's certificate or token. Out: the caller with its roles, or a refusal. `roles` has
the rules, and the gate that checks each call against its row.
"""
