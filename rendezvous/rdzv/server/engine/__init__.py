"""Decide, persist, publish: runs the commands of each job one by one, and writes all records.

In: commands. Out: events and announcements, after the commit. It knows no streams and no protobuf.
"""
