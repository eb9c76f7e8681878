"""A job's command line: torchrun's flags and ours, parsed without a node and without torch.

`declared_flags` lists the flags, `flags` parses them, and `job_options` interprets those that
concern the job. This package is shared by rdzvrun, the daemon and `rdzvctl submit`.
"""
