"""The demo: a real training on one machine that survives a killed worker and a killed node.

`story` starts a server and two nodes as separate programs, kills some of their processes, and
checks rdzvctl's answers after each step. `programs` has these processes; `training` is the script
that they run, with the job's interpreter. The demo uses only what any user can, and changes nothing
beyond its own temporary folder.
"""
