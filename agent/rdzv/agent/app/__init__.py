"""rdzv-agent: the daemon, its settings and its configuration."""
