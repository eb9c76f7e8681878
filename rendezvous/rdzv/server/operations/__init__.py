"""Operators' requests to view and change jobs and nodes.

In: requests from gRPC and HTTP, as plain values. Out: answers, as plain values. This package knows
nothing of protobuf, and decides nothing about a job: a job changes only through a command to its
rendezvous.
"""
