"""Operators' requests about jobs and nodes: to view them, and to change them.

In: requests from gRPC and HTTP, as values. Out: answers, as values. It knows no protobuf, and
decides nothing about a job: a job changes only by a command to its rendezvous.
"""
