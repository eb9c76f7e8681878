"""A relay: `rdzvd --relay` carries many nodes' streams to the leading server, in one call.

Nodes connect to it as to a server. `upstream` sends each stream on as frames, and writes the
server's answers into the node's stream. A relay never decodes what it carries, decides nothing and
stores nothing: if it ends, its nodes reconnect through another relay, and nothing is lost.
"""
