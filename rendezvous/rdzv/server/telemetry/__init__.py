"""Telemetry of rdzvd and its jobs: log lines, metrics, traces, notifications.

In: events and calls of the hooks. Out: lines, /metrics, spans, posts to a webhook. Nothing here
changes a job.
"""
