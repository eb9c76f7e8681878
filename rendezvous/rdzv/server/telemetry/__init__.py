"""Telemetry for rdzvd and its jobs: log lines, metrics and notifications.

In: events, and what is counted by name. Out: the /metrics page, and posts to a webhook.
Nothing here changes a job.
"""
