"""The command line of a job: torchrun's flags and ours, read without a node and without torch.

`flags` has the flags word for word, `job_options` what they mean for the job. rdzvrun, the daemon
and `rdzvctl submit` read the same flags here.
"""
