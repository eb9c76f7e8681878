"""Configuration files in TOML: settings are declared, read, checked, shown and compared.

Each daemon declares its own settings: `rdzv.server.settings` and `rdzv.agent.app`.
"""
