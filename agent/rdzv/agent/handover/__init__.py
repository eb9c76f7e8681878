"""Handover between a node's agents: the instance, its runners, their state, leaked processes."""
