"""The settings of rdzvd, read from rdzvd.toml, and the limits and timings that they set."""
