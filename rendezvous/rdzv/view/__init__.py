"""A job as shown to people: the server's answers as values, documents and history.

In: answers from rdzvd. Out: values, JSON documents, a job's life and its spans. It sends no
requests and decides nothing; `rdzv.ctl` and the HTTP API show the same.
"""
