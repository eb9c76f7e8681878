"""Linux calls used by the runner and the agent: descriptors, processes, accounts, boot time."""
