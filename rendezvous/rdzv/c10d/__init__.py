"""The c10d facade: serves the store for torch's own rendezvous, and observes its jobs.

Unmodified `torchrun --rdzv-backend=c10d` nodes meet in a TCPStore that normally runs on one of
them. With `rdzvd --c10d`, it runs alongside rdzvd. The nodes still form their group by themselves;
this package serves the store and, once a second, reads the state that they have written.

There are four parts, each of which knows only those before it:

* `unpickle`: the nodes' shared state is a pickle, and anyone who can reach the store can write
  one. Our own interpreter reads it, and builds only values from this package. Pure.
* `observations`: the observed jobs, as the views that `rdzvctl` shows. Pure.
* `store_server`: the process that serves the store. It is run by path and needs only the standard
  library and torch. It passes values on without interpreting them.
* `facade`: starts that process, polls it once a second, and restarts it when it exits.

Neither a failure of these parts nor any data in the store can disturb rdzvd.
"""
