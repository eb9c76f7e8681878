"""The local worker group: how it is started, what became of each worker, and how that is told."""
