"""How programs reach rdzvd: addresses, certificates, channels, and options for a node's stream.

In: user input (HOST:PORT, certificate files). Out: gRPC channels and typed errors. It knows the
envelope of the protocol, but nothing about jobs.
"""
