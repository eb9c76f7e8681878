"""Requests of operators about jobs and nodes: to view them, and to change them.

In: requests of gRPC and HTTP, as values. Out: answers as values. It knows no protobuf, and decides
nothing about a job: a job changes only by a command to its rendezvous.
"""
