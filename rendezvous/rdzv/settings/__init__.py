"""Configuration files in TOML: settings are declared, read, checked, shown and compared.

What can be set is declared by each daemon: `rdzv.server.settings` and `rdzv.agent.app`.
"""
