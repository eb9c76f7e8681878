"""Everything served over HTTP: probes, /metrics, the JSON API with its feeds, and the live page.

Nothing here changes a job or a node.
"""
