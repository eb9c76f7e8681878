"""Support for long-running processes: clock, tasks, logs, systemd, exposition of metrics.

Both daemons use it. It knows nothing about jobs, nodes or messages.
"""
