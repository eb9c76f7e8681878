"""Operators' requests to view and to change jobs and nodes.

In: requests from gRPC and HTTP, as plain values. Out: answers, as plain values. This package knows
no protobuf, and decides nothing about a job: a job changes only by a command to its rendezvous.
"""
