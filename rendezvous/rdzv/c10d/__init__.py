"""The c10d facade: torch's own rendezvous, with its store served here and its jobs in view.

Unmodified `torchrun --rdzv-backend=c10d` nodes meet in a TCPStore that otherwise lives on one of
them. With `rdzvd --c10d` it lives beside rdzvd. The nodes still form their group by themselves;
this package serves the store and looks, once a second, at what they have written into it.

Four parts, each of which knows only those before it:

* `unpickle`: the state that the nodes share is a pickle, and whoever reaches the store can write
  one. It is read by a machine that builds values of this package and can call nothing. Pure.
* `watch`: what was seen, look by look, as the view that `rdzvctl` shows. Pure.
* `store_server`: the process that serves the store; run by path, standard library and torch. It
  passes values on without looking into them.
* `facade`: starts that process, asks it once a second, starts it anew when it dies.

A fault of any of it, or of what clients put into the store, never disturbs rdzvd.
"""
