"""One of several servers that share a store: leader election, and tasks done without serving."""
