"""This server among others that share a store: who leads, and what is done without serving."""
