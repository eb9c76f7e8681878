"""Workers' output: log files by round and rank, the console, and remote readers."""
