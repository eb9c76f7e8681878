"""Everything that is served over HTTP: probes, /metrics, the JSON API and its feeds, the page.

It is read-only.
"""
