"""rdzvd: the pure cores, with store, timers, streams and network around them.

`engine` takes each command through *decide, persist, publish*. Nodes enter through `sessions`,
operators through `operations`; `driver` assembles the parts. Only `wire` and `rpc` see protobuf;
`messages` defines the values that they exchange with the other packages.
"""
