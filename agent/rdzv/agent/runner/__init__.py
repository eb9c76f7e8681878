"""Programs started by path, with an interpreter that may have nothing of rdzv.

The runner is the parent of the workers; the zygote forks warm ones; the store host serves a round's
c10d store; `torch_side` runs torch's own classes. They import the standard library and each other's
files only. Their agent is at the other end of a socket (`rdzv.agent.runner_link`).
"""
