"""Support for a long-running process: clock, tasks, logs, systemd, exposition of metrics.

Both daemons use it. It knows no job, no node and no message.
"""
