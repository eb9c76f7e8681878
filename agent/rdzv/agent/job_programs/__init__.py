"""Programs run by the job's interpreter, which may be an old Python and may lack rdzv.

The zygote forks warm workers, the store host serves a round's c10d store, the snapshot carrier
copies snapshots between nodes, and `torch_side` runs torch's own classes. They are started by path
under the job's account, and import only the standard library and torch.
"""
