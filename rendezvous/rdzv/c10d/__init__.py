"""The c10d facade: serves the store for torch's own rendezvous, and observes its jobs.

Unmodified `torchrun --rdzv-backend=c10d` nodes meet in a TCPStore that normally runs on one of
them. With `rdzvd --c10d`, it runs alongside rdzvd. The nodes still form their group by themselves;
this package serves the store and, once a second, reads the state that they have written.

Neither a failure of its parts nor any data in the store can disturb rdzvd. At worst, data can end
the process that serves the store.
"""
