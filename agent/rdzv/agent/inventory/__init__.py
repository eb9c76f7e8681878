"""The node itself: its resources, health, Xid errors, and preemption."""
