"""Telemetry of rdzvd and its jobs: log lines, metrics, traces.

In: events and calls of the hooks. Out: lines, /metrics, spans. Nothing here changes a job.
"""
