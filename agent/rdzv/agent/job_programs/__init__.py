"""Programs run with the job's interpreter, which may lack rdzv and be an old Python.

The zygote forks warm workers; the store host serves a round's c10d store; the snapshot carrier
copies snapshots from node to node; `torch_side` runs torch's own classes. They are started by path,
as the job's account, and import only the standard library and torch.
"""
