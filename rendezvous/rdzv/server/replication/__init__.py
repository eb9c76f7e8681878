"""One server among others that share a store: leader election, and work done without serving."""
