"""A job as people see it: the server's answers as values, documents and history.

In: answers of rdzvd. Out: values, JSON documents, a job's life and its spans. It asks nobody and
decides nothing; `rdzv.ctl` and the HTTP API show the same.
"""
