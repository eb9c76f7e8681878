"""What operators ask of jobs and nodes: to see them, and to change them.

In: requests of gRPC and HTTP, as values. Out: answers as values. It knows no protobuf, and decides
nothing about a job: what changes one is a command to its rendezvous.
"""
