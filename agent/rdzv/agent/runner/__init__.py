"""The runner: the parent process of one job's workers on one node, and of the job's store hosts.

It is a process with one thread, started by path (`__main__.py`). It imports only the standard
library and its own files, by relative imports and all at its start: it is up in milliseconds,
nothing in the environment of job or agent can break it, and an upgrade may replace its files. The
agent sends requests over a socket (requests.py) and receives events (agent_link.py); the agent's
end is `rdzv.agent.runner_link`. It decides nothing about jobs.

How a worker is spawned: workers.py, spawn.py. How its exit is noticed: child_exits.py. How it is
killed: killing.py, fence.py. How it is kept between two rounds: worker_links.py, parked_workers.py,
kept_workers.py. What outlives it: snapshot_slots.py, snapshot_copies.py, held_connections.py.
How an agent is replaced: next_agent.py. How forks of the zygote are used: warm_forks.py.

It opens no path of a job and waits for no exec: otherwise a hung file system would block it, and
with it the fence and every stop. A child opens its own files as its own account; a pipe that the
exec closes shows when it runs, or why it does not. With an *identity* a process runs as a different
account than the runner, which is then root, so that no worker can end its runner or escape it.

A lack of descriptors or memory ends neither the runner nor the job. Processes that cannot be
started are reported like any other failure to start. Processes that cannot be inspected count as
present, so `gone` waits until they can. The runner keeps the list of its own children open. That
list is enough: descendants of a child become children as soon as their parents are dead.
"""
