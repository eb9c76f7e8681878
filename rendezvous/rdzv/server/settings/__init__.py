"""rdzvd's settings, as read from rdzvd.toml, and the limits and timings that they determine."""
