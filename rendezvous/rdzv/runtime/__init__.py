"""What a long-running process needs beside its subject: clock, tasks, logs, systemd, exposition.

Both daemons use it. It knows no job, no node and no message.
"""
