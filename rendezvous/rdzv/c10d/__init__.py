"""The c10d facade: serves the store for torch's own rendezvous, and observes its jobs.

Unmodified `torchrun --rdzv-backend=c10d` nodes meet in a TCPStore that normally runs on one of
them. With `rdzvd --c10d`, it runs alongside rdzvd. The nodes still form their group by themselves;
this package serves the store and, once a second, reads the state that they have written.

There are three parts:

* `observations`: the observed jobs, as the views that `rdzvctl` shows. Pure.
* `store_server`: the process that serves the store and reads the nodes' shared state, a pickle that
  anyone who can reach the store may have written. It is run by path and needs only the standard
  library and torch.
* `facade`: starts that process, polls it once a second, and restarts it when it exits.

Neither a failure of these parts nor any data in the store can disturb rdzvd. At worst, data can end
the process that serves the store.
"""
