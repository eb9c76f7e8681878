"""Support for long-running processes: clock, tasks, logs, systemd, and metrics exposition.

It is used by both daemons, and is independent of jobs, nodes and messages.
"""
