"""Handover between agents of a node: the instance, its runners, their state, leaked processes."""
