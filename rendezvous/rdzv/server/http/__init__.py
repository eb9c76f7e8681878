"""Everything that is asked by HTTP: probes, /metrics, the JSON API and its feeds, the page.

It reads and changes nothing.
"""
