"""Decide, persist, publish: runs each job's commands one by one, and writes all records.

In: commands. Out: events and announcements, after the commit. It knows neither streams nor
protobuf.
"""
