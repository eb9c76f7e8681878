"""Who calls, and what that caller may do: certificates, tokens, roles.

In: a caller's certificate or token. Out: a caller with a role, or a refusal. The gate itself stands
in `rdzv.server.rpc.access`.
"""
