"""The machine below the agent: accounts, files, folders, threads and processes.

Files and processes of a job are accessed with the rights of the job's account (`accounts`).
"""
