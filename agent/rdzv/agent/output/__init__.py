"""What workers write: log files by round and rank, the console, and readers far away."""
