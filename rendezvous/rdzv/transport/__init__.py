"""Connections from programs to rdzvd: addresses, certificates, channels, and stream options.

Input: user input (HOST:PORT, certificate files). Output: gRPC channels and typed errors. This
package handles the envelope of the protocol, but nothing about jobs.
"""
