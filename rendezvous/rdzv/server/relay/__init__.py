"""A relay: `rdzvd --relay` carries many nodes' streams to the server that leads, in one call.

Nodes connect to it as to a server; `upstream` sends each stream on as frames, and what the server
sends to a node goes back into the node's stream. A relay never reads what it carries, decides
nothing and stores nothing: if it ends, its nodes come back through another one, and nothing is
lost.
"""
