"""One server among those that share a store: leader election, and work done without serving."""
