"""A job's command line: torchrun's flags and ours, read without a node and without torch.

`declared_flags` lists the flags, `flags` reads them, and `job_options` has their meaning for the
job. rdzvrun, the daemon and `rdzvctl submit` read the same flags here.
"""
