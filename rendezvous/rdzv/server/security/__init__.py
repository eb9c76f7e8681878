"""Callers and their permissions: certificates, tokens, roles.

In: a caller's certificate or token. Out: a caller with a role, or a refusal. `access` is the gate
in front of each call, `roles` the table it reads.
"""
