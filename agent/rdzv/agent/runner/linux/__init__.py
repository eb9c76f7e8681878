"""Linux calls of runner and agent: descriptors, process trees, accounts, boot time."""
