"""The machine below the agent: accounts, files, folders, threads and processes.

Everything of a job's is touched with the rights of the job's account (`accounts`).
"""
