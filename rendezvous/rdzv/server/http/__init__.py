"""Everything that is served by HTTP: probes, /metrics, the JSON API and its feeds, the page.

It reads and changes nothing.
"""
