"""One job on this node: events to the agent core, its commands to runner and server."""
