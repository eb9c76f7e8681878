"""A relay: `rdzvd --relay` carries the streams of many nodes to the server that leads, in one call.

Nodes connect as to a server; each stream comes out of `upstream` as frames, and what the server
says to a node goes into its stream again. A relay never reads what it carries, decides nothing and
stores nothing: if it ends, its nodes come back by another, and nothing was lost.
"""
