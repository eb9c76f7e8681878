"""Decide, persist, publish: one command after another for each job, and each record of the store.

In: commands. Out: events and announcements, after the commit. It knows no streams and no protobuf.
"""
