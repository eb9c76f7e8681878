"""A job as shown to people: the server's responses as values, documents and history.

Input: responses from rdzvd. Output: values, JSON documents, and a job's life. It sends no requests
and makes no decisions. `rdzv.ctl` and the HTTP API show the same data.
"""
