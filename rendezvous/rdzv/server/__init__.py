"""rdzvd: the pure cores with store, timers, streams and network around them.

A command goes *decide, persist, publish* in `engine`. Nodes come in through `sessions`, operators
through `operations`; `driver` puts the parts together. Only `wire` and `rpc` see protobuf;
`messages` are the values that pass between them and the rest.
"""
