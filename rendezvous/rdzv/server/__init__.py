"""rdzvd: the pure cores, with store, timers, streams and network around them.

`engine` takes each command through *decide, persist, publish*. Nodes come in through `sessions`,
operators through `operations`; `driver` puts the parts together. Only `wire` and `rpc` see
protobuf; `messages` has the values that pass between them and the rest.
"""
