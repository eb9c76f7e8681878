"""rdzvd: the driver around the pure cores, and its door to the network.

`driver` holds the order of things: *decide, persist, publish*. It knows streams, timers and the
store, and decides nothing. `service` and `wire` are the door, and with `__main__` the only
modules that see protobuf. `messages` are the values that pass between the two, `told` says who is
to hear what, `observe` turns events into the lines of log and history.
"""
