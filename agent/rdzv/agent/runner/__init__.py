"""The runner: the parent process of one job's workers on one node, and of the job's store hosts.

It is a single-threaded process, started by path (`__main__.py`). At startup it imports everything
it needs, using relative imports and only the standard library and its own files. It is therefore up
within milliseconds, nothing in the environment of the job or agent can break it, and an upgrade may
replace its files while it runs. The agent sends requests over a socket (requests.py) and receives
events (agent_link.py, which also says how an agent is replaced); the agent's end is
`rdzv.agent.runner_link`. The runner itself makes no decisions about jobs. `runner.Runner` is the
one object that all parts know.

How a worker is spawned: workers.py, spawn.py. How its exit is detected: child_exits.py. How it is
killed: killing.py, fence.py. How it is kept between rounds: worker.py, parked_workers.py.
Resources that outlive it: snapshot_slots.py, snapshot_copies.py, held_connections.py. How forks of
the zygote are used: warm_forks.py, zygote_process.py. Frames, and values of them: channel.py,
frames.py.

The runner never opens a job's paths or waits for an exec, because a hung file system would then
block it, along with the fence and every stop. Each child opens its own files under its own account;
a pipe that closes on exec shows when the child is running, or why it is not. A process with an
*identity* runs under a different account from the runner, which is then root, so no worker can kill
its runner or escape from it.

Running out of descriptors or memory ends neither the runner nor the job. Processes that cannot be
started are reported like any other failure to start. Processes that cannot be inspected count as
present, so `gone` waits until they can. The runner keeps the kernel's list of its own children
open. That list is sufficient, because a child's descendants become the runner's children as soon as
their parents die.
"""
