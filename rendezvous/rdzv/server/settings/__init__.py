"""Every limit and timing of rdzvd, and rdzvd.toml, which sets them."""
