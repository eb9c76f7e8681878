"""The machine below the agent: accounts, files, folders, threads and processes.

A job's files and processes are accessed with the rights of the job's account (`accounts`).
"""
