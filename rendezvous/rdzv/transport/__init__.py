"""How programs reach rdzvd: addresses, certificates, channels, and options for a node's stream.

Input: user input (HOST:PORT, certificate files). Output: gRPC channels and typed errors. This
package handles the envelope of the protocol, but nothing about jobs.
"""
