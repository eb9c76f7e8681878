"""The c10d facade: torch's own rendezvous, with its store served here and its jobs observed.

Unmodified `torchrun --rdzv-backend=c10d` nodes meet in a TCPStore that otherwise runs on one of
them. With `rdzvd --c10d` it runs beside rdzvd. The nodes still form their group by themselves;
this package serves the store and reads, once a second, the state that they have written.

Four parts, each of which knows only those before it:

* `unpickle`: the state that the nodes share is a pickle, and anyone who reaches the store can
  write one. An interpreter of our own reads it, which builds only values of this package. Pure.
* `observations`: the observed jobs, as the view that `rdzvctl` shows. Pure.
* `store_server`: the process that serves the store; run by path, standard library and torch. It
  passes values on without interpreting them.
* `facade`: starts that process, asks it once a second, and restarts it when it dies.

No fault of these parts, or of data in the store, disturbs rdzvd.
"""
