"""Linux calls used by runner and agent: descriptors, process trees, accounts, boot time."""
