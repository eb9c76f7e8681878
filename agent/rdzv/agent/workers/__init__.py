"""The local worker group: its start, how each worker ended, and the reports about it."""
