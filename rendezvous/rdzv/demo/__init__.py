"""The demo: a real training job on one machine that survives a killed worker and a killed node.

`story` starts a server and two nodes as separate programs, kills some of their processes, and
checks rdzvctl's answers after each step. `programs` runs these processes; `training` is the script
that the nodes run with the job's interpreter. The demo uses only what is available to any user, and
changes nothing outside its temporary directory.
"""
