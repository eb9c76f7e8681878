"""Support for a long-running process: clock, tasks, logs, systemd, exposition of metrics.

Both daemons use it. It knows nothing of jobs, nodes or messages.
"""
