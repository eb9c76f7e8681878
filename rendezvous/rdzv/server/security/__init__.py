"""Who calls, and what that caller may do: certificates, tokens, roles.

In: a caller's certificate or token. Out: a caller with a role, or a refusal. `access` is the gate
that each call passes, `roles` the table it reads.
"""
