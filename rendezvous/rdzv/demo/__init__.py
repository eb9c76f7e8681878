"""The demo: a real training on one machine that survives a killed worker and a killed node.

`story` starts a server and two nodes as programs of their own, kills some of their processes, and
checks what rdzvctl says after each step. `programs` has these processes; `training` is the script
that they run, with the job's interpreter. The demo asks only what a user can ask, and changes
nothing beyond its own temporary folder.
"""
