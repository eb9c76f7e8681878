"""What this node has and whether it is well: resources, health, Xid errors, preemption."""
