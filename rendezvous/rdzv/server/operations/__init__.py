"""Operators' requests to view and change jobs and nodes.

In: requests from gRPC and HTTP. Out: answers, as values of `view`. This package decides
nothing about a job: a job changes only through a command to its rendezvous.
"""
