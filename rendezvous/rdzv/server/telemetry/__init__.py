"""Telemetry about rdzvd and its jobs: log lines, metrics, traces, notifications.

In: events, and calls to the `Meter`. Out: lines, /metrics, spans, posts to a webhook. Nothing here
changes a job.
"""
