"""Configuration files in TOML: reads, checks, shows and compares settings.

Each daemon declares its settings in its own module: `server/settings/server_settings.py` and
`agent/app/agent_settings.py`.
"""
