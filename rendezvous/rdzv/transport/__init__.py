"""How programs reach rdzvd: addresses, certificates, channels, and the options of a node's stream.

In: what a user wrote (HOST:PORT, files of certificates). Out: gRPC channels and typed errors. It
knows the envelope of the protocol, and nothing of jobs.
"""
