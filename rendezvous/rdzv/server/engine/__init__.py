"""Decide, persist, publish: runs each job's commands one at a time and writes every stored record.

In: commands. Out: events and announcements, after the commit. This package knows nothing of streams
or protobuf.
"""
