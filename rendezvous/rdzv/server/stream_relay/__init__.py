"""A relay: `rdzvd --relay` carries many nodes' streams to the leading server in a single call.

Nodes connect to a relay as they would to a server. `upstream` sends each stream on as frames, and
writes the server's answers to the node's stream. A relay never decodes the messages it carries,
decides nothing and stores nothing: if it ends, its nodes reconnect through another relay, and
nothing is lost.
"""
