"""The node's stream to the server, and the conversion of its messages to values of the core."""
