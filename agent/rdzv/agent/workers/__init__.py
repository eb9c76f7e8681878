"""The local worker group: its start, the fate of each worker, and the reports about it."""
