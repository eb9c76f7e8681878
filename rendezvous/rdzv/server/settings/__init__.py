"""All limits and timings of rdzvd, and rdzvd.toml, which sets them."""
