"""Everything served over HTTP: probes, /metrics, the JSON API with its feeds, and the live page.

It changes no job and no node.
"""
