"""The gRPC services, the gate in front of their calls, rate limits, and gRPC's own server.

In: calls. Out: values for the driver, and the driver's answers as messages. This package decides
nothing about jobs.
"""
