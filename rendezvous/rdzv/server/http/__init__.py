"""Everything served over HTTP, read-only: probes, /metrics, the JSON API, its feeds, the page."""
