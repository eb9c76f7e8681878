"""The command line of a job: torchrun's flags and ours, read without a node and without torch.

`flags` defines the flags, `job_options` their meaning for the job. rdzvrun, the daemon
and `rdzvctl submit` read the same flags here.
"""
