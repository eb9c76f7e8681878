"""rdzvd: the pure cores, surrounded by store, timers, streams and network.

`engine` takes each command through *decide, persist, publish*. Nodes enter through `sessions`,
operators through `operations`; `driver` assembles the parts. Only `wire` and `rpc` deal with
protobuf; `messages` defines the values that they exchange with the other packages.
"""
