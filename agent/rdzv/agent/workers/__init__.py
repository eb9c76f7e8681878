"""The local worker group: how it is started, how each worker ended, and the reports about it."""
