"""Reads, checks, prints and compares settings, which are stored in TOML files.

Each daemon declares its settings in its own module: `server/settings/server_settings.py` and
`agent/app/agent_settings.py`.
"""
