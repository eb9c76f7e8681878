"""Every fault: what it does, to whom, and what it may cost.

A fault is two functions. `choose` picks the victim; `harm` does the harm, heals it, and returns
how many frames it has harmed if it is of the network's kind. What follows is judged from outside.

| target | killed | stopped | restarted | cut off | 30 % loss | 200 ms | full disk |
|---|---|---|---|---|---|---|---|
| server, alone | kill-server, kill-server-failing, kill-server-and-host, kill-server-completing | stop-server, stop-server-long | restart-server | cut-server | (agent) | (agent) | fill-server, fill-server-failing |
| server that leads | kill-leader, kill-leader-failing, kill-leader-and-host, kill-leader-completing | stop-leader, stop-leader-long | restart-leader | cut-leader, cut-leader-etcd, cut-leader-etcd-up, cut-leader-etcd-down | lose-leader-etcd | slow-leader-etcd | - |
| server that stands by | kill-follower | stop-follower | - | - | - | - | - |
| member of etcd | kill-etcd, kill-etcd-majority | stop-etcd | restart-etcd | cut-etcd | lose-etcd | slow-etcd | fill-etcd |
| agent | kill-agent | stop-agent, stop-agent-short | restart-agent | cut-agent, cut-agent-short, cut-agent-up, cut-agent-down | lose-agent | slow-agent | - |
| runner | kill-runner | stop-runner | - | - | - | - | - |
| worker | kill-worker | stop-worker | - | cut-peers | lose-peers | slow-peers | - |
| store host | kill-store-host | stop-store-host | - | - | - | - | - |
| host | kill-host | - | - | cut-host | - | - | - |

A runner or store host is never restarted by itself, and has no connection but its agent's socket
and its workers' connections.
"""  # noqa: E501

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.errors import StuckError
from tests.faults.etcd import MEMBERS
from tests.faults.history import Promise
from tests.faults.lane import ALONE, NODES, Lane, kill_tree, stopped, wait_exit
from tests.faults.network import Harm, cut, lossy, slow

STOP_S = 20.0
LONG_STOP_S = 40.0
"""Longer than every lease, and than the 30 s in which a new server gives no node up."""
SHORT_S = 1.5
"""Shorter than the lease of 5 s, whenever the last heartbeat was.

TCP's own backoff counts, too: a message sent during it may arrive as much later again.
"""
CUT_S = 12.0
"""Longer than the lease: the node is given up, and the others continue."""
REFORM_S = 60.0
"""How long the others may take to train again without a node that is cut off: lease, stop, new
round.

It includes 30 s in which a server gives up no node that leaves just after the server stood still.
"""
TAKE_OVER_S = 60.0
"""The same after a takeover, in which no node is given up for 30 s."""
EXIT_S = 30.0
FIRST_ROUND_S = 60.0
ALONE_HOST = ALONE[0]


@dataclass(frozen=True, slots=True)
class Victim:
    """The target of a fault. `unseen`: hosts whose workers the server cannot see stopped."""

    hosts: tuple[str, ...]
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault on one kind of target."""

    name: str
    promise: Promise
    choose: Callable[[Lane, random.Random], Victim]
    harm: Callable[[Lane, Victim], int | None]
    usual_s: float
    """How long it usually takes, for dividing the work among lanes."""
    needs: str = ""
    """`torch`: workers with torch; `sqlite`: a single server; `etcd`: several servers on etcd."""


# ------------------------------------------------------------------ victims


def the_server(lane: Lane, _: random.Random) -> Victim:
    return Victim(ALONE)


def the_leader(lane: Lane, _: random.Random) -> Victim:
    return Victim((lane.leader(),))


def some_follower(lane: Lane, rng: random.Random) -> Victim:
    leader = lane.leader()
    return Victim((rng.choice([host for host in lane.hosts if host != leader]),))


def the_server_and_a_node(lane: Lane, rng: random.Random) -> Victim:
    return Victim((lane.leader_or_alone(), rng.choice(NODES)))


def some_member(lane: Lane, rng: random.Random) -> Victim:
    return Victim((rng.choice(MEMBERS),))


def two_members(lane: Lane, rng: random.Random) -> Victim:
    return Victim(tuple(rng.sample(MEMBERS, 2)))


def some_node(lane: Lane, rng: random.Random) -> Victim:
    return Victim((rng.choice(NODES),))


def some_unseen_node(lane: Lane, rng: random.Random) -> Victim:
    host = rng.choice(NODES)
    return Victim((host,), unseen=(host,))


def two_nodes(lane: Lane, rng: random.Random) -> Victim:
    """Return two nodes whose workers talk to each other, as all do with RANK 0's."""
    first = lane.host_of_rank_0()
    return Victim((first, rng.choice([host for host in NODES if host != first])))


def store_host_node(lane: Lane, _: random.Random) -> Victim:
    """Return the node of GROUP_RANK 0, which serves the round's store."""
    (seat,) = (n for n in lane.status().nodes if n.state == "seated" and n.group_rank == 0)
    (host,) = (a.host for a in lane.agents.values() if a.node_id == seat.node_id)
    return Victim((host,))


def _others(victim: Victim) -> set[str]:
    return set(NODES) - set(victim.hosts)


# ------------------------------------------------------------------ servers


def kill_server(lane: Lane, victim: Victim) -> None:
    """SIGKILL, and start it again at once."""
    (host,) = victim.hosts
    lane.servers[host].kill()
    wait_exit(lane.servers[host], EXIT_S)
    lane.start_server(host)


def kill_server_failing(lane: Lane, victim: Victim) -> None:
    """SIGKILL the server, then a worker while the server is away."""
    (host,) = victim.hosts
    lane.servers[host].kill()
    wait_exit(lane.servers[host], EXIT_S)
    os.kill(lane.worker_pid(NODES[0]), signal.SIGKILL)
    time.sleep(1.0)
    lane.start_server(host)


def kill_server_and_host(lane: Lane, victim: Victim) -> None:
    """SIGKILL the server, and everything on a node while no server can see that.

    The other workers fail because their peer is gone. The cause is known only when the server has
    waited in vain for the node: nothing is charged.
    """
    server, host = victim.hosts
    lane.servers[server].kill()
    wait_exit(lane.servers[server], EXIT_S)
    process = lane.agents[host].process
    kill_tree(process.pid)
    wait_exit(process, EXIT_S)
    time.sleep(1.0)
    lane.start_server(server)
    lane.wait_training(set(NODES) - {host}, TAKE_OVER_S)
    lane.start_agent(host)


def kill_server_completing(lane: Lane, victim: Victim) -> None:
    """SIGKILL the server as the first round of another job completes, and restart it at once.

    The nodes of that job may not have received their incarnations. All must run that round to its
    end.
    """
    (host,) = victim.hosts
    with lane.another_job() as (job, processes):
        lane.wait_logged(host, f"{job}: round 0 complete", FIRST_ROUND_S)
        lane.servers[host].kill()
        wait_exit(lane.servers[host], EXIT_S)
        lane.start_server(host)
        codes = [wait_exit(process, TAKE_OVER_S) for process in processes]
    if any(codes):
        raise StuckError(f"{job} ended with {codes}: a node was not taken back")


def restart_server(lane: Lane, victim: Victim) -> None:
    """SIGTERM, and start it again."""
    (host,) = victim.hosts
    lane.servers[host].terminate()
    wait_exit(lane.servers[host], EXIT_S)
    lane.start_server(host)


def stop_server(lane: Lane, victim: Victim) -> None:
    with stopped(lane.servers[victim.hosts[0]].pid):
        time.sleep(STOP_S)


def stop_server_long(lane: Lane, victim: Victim) -> None:
    with stopped(lane.servers[victim.hosts[0]].pid):
        time.sleep(LONG_STOP_S)


def cut_server(lane: Lane, victim: Victim) -> int:
    """Cut the server off from every node, for longer than the lease: the silence is its own."""
    return lane.harm_network([h for node in NODES for h in cut(node, ALONE_HOST)], CUT_S)


def fill_server(lane: Lane, victim: Victim) -> None:
    """Fill the disk of the server's data for a while."""
    with lane.full_disk(victim.hosts[0]):
        time.sleep(5.0)


def fill_server_failing(lane: Lane, victim: Victim) -> None:
    """SIGKILL a worker while the disk is full: it is charged once there is room."""
    with lane.full_disk(victim.hosts[0]):
        os.kill(lane.worker_pid(NODES[1]), signal.SIGKILL)
        time.sleep(5.0)


def cut_leader(lane: Lane, victim: Victim) -> int:
    """Cut the leader off from all: nodes, other servers and etcd."""
    (host,) = victim.hosts
    others = [other for other in (*NODES, *lane.hosts, *MEMBERS) if other != host]
    return lane.harm_network([h for other in others for h in cut(host, other)], CUT_S)


def cut_leader_etcd(lane: Lane, victim: Victim) -> int:
    """Cut the leader off from etcd only: it must not continue as if it led."""
    return lane.harm_network([h for m in MEMBERS for h in cut(victim.hosts[0], m)], CUT_S)


def cut_leader_etcd_up(lane: Lane, victim: Victim) -> int:
    return lane.harm_network([Harm(victim.hosts[0], m, loss=1.0) for m in MEMBERS], CUT_S)


def cut_leader_etcd_down(lane: Lane, victim: Victim) -> int:
    return lane.harm_network([Harm(m, victim.hosts[0], loss=1.0) for m in MEMBERS], CUT_S)


def lose_leader_etcd(lane: Lane, victim: Victim) -> int:
    return lane.harm_network([h for m in MEMBERS for h in lossy(victim.hosts[0], m, 0.3)], CUT_S)


def slow_leader_etcd(lane: Lane, victim: Victim) -> int:
    return lane.harm_network([h for m in MEMBERS for h in slow(victim.hosts[0], m, 200)], CUT_S)


# ------------------------------------------------------------------ members of etcd


def kill_etcd(lane: Lane, victim: Victim) -> None:
    """SIGKILL a member, or several, and start them again after a while."""
    for host in victim.hosts:
        lane.etcd.processes[host].kill()
        wait_exit(lane.etcd.processes[host], EXIT_S)
    time.sleep(SHORT_S)
    for host in victim.hosts:
        lane.etcd.start(host)
    lane.etcd.wait_healthy()


def kill_etcd_majority(lane: Lane, victim: Victim) -> None:
    """Leave etcd without a majority for longer than a leader can prove its leadership."""
    for host in victim.hosts:
        lane.etcd.processes[host].kill()
        wait_exit(lane.etcd.processes[host], EXIT_S)
    time.sleep(CUT_S)
    for host in victim.hosts:
        lane.etcd.start(host)
    lane.etcd.wait_healthy()


def restart_etcd(lane: Lane, victim: Victim) -> None:
    (host,) = victim.hosts
    lane.etcd.processes[host].terminate()
    wait_exit(lane.etcd.processes[host], EXIT_S)
    lane.etcd.start(host)
    lane.etcd.wait_healthy()


def stop_etcd(lane: Lane, victim: Victim) -> None:
    with stopped(lane.etcd.processes[victim.hosts[0]].pid):
        time.sleep(STOP_S)
    lane.etcd.wait_healthy()


def cut_etcd(lane: Lane, victim: Victim) -> int:
    """Cut a member off from the others and from all servers."""
    (host,) = victim.hosts
    others = [other for other in (*lane.hosts, *MEMBERS) if other != host]
    return _harm_etcd(lane, [h for other in others for h in cut(host, other)])


def lose_etcd(lane: Lane, victim: Victim) -> int:
    others = [member for member in MEMBERS if member not in victim.hosts]
    return _harm_etcd(lane, [h for m in others for h in lossy(victim.hosts[0], m, 0.3)])


def slow_etcd(lane: Lane, victim: Victim) -> int:
    """Delay a member's messages to the others by more than they wait for a heartbeat."""
    others = [member for member in MEMBERS if member not in victim.hosts]
    return _harm_etcd(lane, [h for m in others for h in slow(victim.hosts[0], m, 200)])


def _harm_etcd(lane: Lane, harms: list[Harm]) -> int:
    harmed = lane.harm_network(harms, CUT_S)
    lane.etcd.wait_healthy()
    return harmed


def fill_etcd(lane: Lane, victim: Victim) -> None:
    """SIGKILL a member and start it on a full disk, where it may fail; then make room.

    Filling the disk alone would have no effect for a while, because etcd allocates its log in
    advance.
    """
    (host,) = victim.hosts
    lane.etcd.processes[host].kill()
    wait_exit(lane.etcd.processes[host], EXIT_S)
    with lane.full_disk(host):
        lane.etcd.start(host)
        time.sleep(5.0)
    if lane.etcd.processes[host].poll() is not None:
        lane.etcd.start(host)
    lane.etcd.wait_healthy()


# ------------------------------------------------------------------ agents and hosts


def kill_agent(lane: Lane, victim: Victim) -> None:
    """SIGKILL rdzvrun; the others continue without it, then it is restarted."""
    (host,) = victim.hosts
    process = lane.agents[host].process
    process.kill()
    wait_exit(process, EXIT_S)
    lane.wait_training(_others(victim), REFORM_S)
    lane.start_agent(host)


def kill_host(lane: Lane, victim: Victim) -> None:
    """SIGKILL everything on a host at once."""
    (host,) = victim.hosts
    process = lane.agents[host].process
    kill_tree(process.pid)
    wait_exit(process, EXIT_S)
    lane.wait_training(_others(victim), REFORM_S)
    lane.start_agent(host)


def restart_agent(lane: Lane, victim: Victim) -> None:
    """SIGTERM rdzvrun, which leaves, and start another."""
    lane.renew(victim.hosts[0])


def stop_agent(lane: Lane, victim: Victim) -> None:
    """SIGSTOP rdzvrun for longer than the lease; the others continue without it."""
    with stopped(lane.agents[victim.hosts[0]].process.pid):
        until = time.monotonic() + STOP_S
        lane.wait_training(_others(victim), REFORM_S)
        time.sleep(max(until - time.monotonic(), 0.0))


def stop_agent_short(lane: Lane, victim: Victim) -> None:
    with stopped(lane.agents[victim.hosts[0]].process.pid):
        time.sleep(SHORT_S)


def cut_agent(lane: Lane, victim: Victim) -> int:
    """Cut a node off from the server, but not from its peers, for longer than the lease."""
    return _cut_and_reform(lane, victim, cut(victim.hosts[0], lane.leader_or_alone()))


def cut_agent_short(lane: Lane, victim: Victim) -> int:
    return lane.harm_network(cut(victim.hosts[0], lane.leader_or_alone()), SHORT_S)


def cut_agent_up(lane: Lane, victim: Victim) -> int:
    """Lose a node's messages to the server; the node still receives the server's."""
    return _cut_and_reform(lane, victim, (Harm(victim.hosts[0], lane.leader_or_alone(), loss=1.0),))


def cut_agent_down(lane: Lane, victim: Victim) -> int:
    """Lose the server's messages to a node; the server still receives the node's for a while."""
    return lane.harm_network((Harm(lane.leader_or_alone(), victim.hosts[0], loss=1.0),), CUT_S)


def lose_agent(lane: Lane, victim: Victim) -> int:
    return lane.harm_network(lossy(victim.hosts[0], lane.leader_or_alone(), 0.3), CUT_S)


def slow_agent(lane: Lane, victim: Victim) -> int:
    return lane.harm_network(slow(victim.hosts[0], lane.leader_or_alone(), 200), CUT_S)


def cut_host(lane: Lane, victim: Victim) -> int:
    """Cut a node off from the server and from its peers."""
    (host,) = victim.hosts
    harms = [h for other in (*lane.hosts, *_others(victim)) for h in cut(host, other)]
    return _cut_and_reform(lane, victim, harms)


def _cut_and_reform(lane: Lane, victim: Victim, harms: list[Harm] | tuple[Harm, ...]) -> int:
    """Harm the network until the others train without the victim, and for at least CUT_S."""
    until = time.monotonic() + CUT_S
    lane.network.harm(harms)
    try:
        lane.wait_training(_others(victim), REFORM_S)
        time.sleep(max(until - time.monotonic(), 0.0))
    finally:
        harmed = lane.network.harm(())
    return harmed


def _two(victim: Victim) -> tuple[str, str]:
    one, other = victim.hosts
    return one, other


# ------------------------------------------------------------------ on a node


def kill_runner(lane: Lane, victim: Victim) -> None:
    """SIGKILL the runner: its agent gives up, the others continue, and another agent starts."""
    (host,) = victim.hosts
    os.kill(lane.below(host, "runner/__main__.py"), signal.SIGKILL)
    wait_exit(lane.agents[host].process, EXIT_S)
    lane.start_agent(host)


def stop_runner(lane: Lane, victim: Victim) -> None:
    with stopped(lane.below(victim.hosts[0], "runner/__main__.py")):
        time.sleep(STOP_S / 2)  # After 16 s without an answer it hangs, and is killed.


def kill_worker(lane: Lane, victim: Victim) -> None:
    os.kill(lane.worker_pid(victim.hosts[0]), signal.SIGKILL)


def stop_worker(lane: Lane, victim: Victim) -> None:
    """SIGSTOP a worker: its peers wait for it, and all continue."""
    with stopped(lane.worker_pid(victim.hosts[0])):
        time.sleep(STOP_S)


def kill_store_host(lane: Lane, victim: Victim) -> None:
    """SIGKILL the store host; every other time a node is renewed once the group has formed anew.

    After three failures in a row on one node there would be no host: RANK 0's worker would serve
    the store itself.
    """
    before = lane.wait_group(REFORM_S)
    os.kill(lane.below(victim.hosts[0], "store_host.py"), signal.SIGKILL)
    lane.store_hosts_killed += 1
    if lane.store_hosts_killed % 2 == 0:
        lane.wait_group(REFORM_S, changed_from=before)
        lane.renew(victim.hosts[0])


def stop_store_host(lane: Lane, victim: Victim) -> None:
    with stopped(lane.below(victim.hosts[0], "store_host.py")):
        time.sleep(STOP_S)


def cut_peers(lane: Lane, victim: Victim) -> int:
    """Cut two nodes off from each other; both still have the server."""
    return lane.harm_network(cut(*_two(victim)), CUT_S)


def lose_peers(lane: Lane, victim: Victim) -> int:
    return lane.harm_network(lossy(*_two(victim), 0.3), CUT_S)


def slow_peers(lane: Lane, victim: Victim) -> int:
    return lane.harm_network(slow(*_two(victim), 200), CUT_S)


NOTHING, NO_RESTART, ONE_RESTART = Promise.NOTHING, Promise.NO_RESTART, Promise.ONE_RESTART

CATALOGUE: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("kill-server", NOTHING, the_server, kill_server, 4, needs="sqlite"),
        Fault(
            "kill-server-failing", ONE_RESTART, the_server, kill_server_failing, 6, needs="sqlite"
        ),
        Fault(
            "kill-server-and-host",
            NO_RESTART,
            the_server_and_a_node,
            kill_server_and_host,
            40,
            needs="sqlite",
        ),
        Fault(
            "kill-server-completing",
            NOTHING,
            the_server,
            kill_server_completing,
            14,
            needs="sqlite",
        ),
        Fault("restart-server", NOTHING, the_server, restart_server, 4, needs="sqlite"),
        Fault("stop-server", NOTHING, the_server, stop_server, 24, needs="sqlite"),
        Fault("stop-server-long", NOTHING, the_server, stop_server_long, 44, needs="sqlite"),
        Fault("cut-server", NOTHING, the_server, cut_server, 20, needs="sqlite"),
        Fault("fill-server", NOTHING, the_server, fill_server, 8, needs="sqlite"),
        Fault(
            "fill-server-failing", ONE_RESTART, the_server, fill_server_failing, 10, needs="sqlite"
        ),
        Fault("kill-leader", NOTHING, the_leader, kill_server, 6, needs="etcd"),
        Fault("kill-leader-failing", ONE_RESTART, the_leader, kill_server_failing, 8, needs="etcd"),
        Fault(
            "kill-leader-and-host",
            NO_RESTART,
            the_server_and_a_node,
            kill_server_and_host,
            40,
            needs="etcd",
        ),
        Fault(
            "kill-leader-completing", NOTHING, the_leader, kill_server_completing, 16, needs="etcd"
        ),
        Fault("restart-leader", NOTHING, the_leader, restart_server, 6, needs="etcd"),
        Fault("stop-leader", NOTHING, the_leader, stop_server, 24, needs="etcd"),
        Fault("stop-leader-long", NOTHING, the_leader, stop_server_long, 44, needs="etcd"),
        Fault("cut-leader", NOTHING, the_leader, cut_leader, 20, needs="etcd"),
        Fault("cut-leader-etcd", NOTHING, the_leader, cut_leader_etcd, 20, needs="etcd"),
        Fault("cut-leader-etcd-up", NOTHING, the_leader, cut_leader_etcd_up, 20, needs="etcd"),
        Fault("cut-leader-etcd-down", NOTHING, the_leader, cut_leader_etcd_down, 20, needs="etcd"),
        Fault("lose-leader-etcd", NOTHING, the_leader, lose_leader_etcd, 16, needs="etcd"),
        Fault("slow-leader-etcd", NOTHING, the_leader, slow_leader_etcd, 14, needs="etcd"),
        Fault("kill-follower", NOTHING, some_follower, kill_server, 6, needs="etcd"),
        Fault("stop-follower", NOTHING, some_follower, stop_server, 22, needs="etcd"),
        Fault("kill-etcd", NOTHING, some_member, kill_etcd, 8, needs="etcd"),
        Fault("kill-etcd-majority", NOTHING, two_members, kill_etcd_majority, 22, needs="etcd"),
        Fault("restart-etcd", NOTHING, some_member, restart_etcd, 8, needs="etcd"),
        Fault("stop-etcd", NOTHING, some_member, stop_etcd, 24, needs="etcd"),
        Fault("cut-etcd", NOTHING, some_member, cut_etcd, 20, needs="etcd"),
        Fault("lose-etcd", NOTHING, some_member, lose_etcd, 18, needs="etcd"),
        Fault("slow-etcd", NOTHING, some_member, slow_etcd, 18, needs="etcd"),
        Fault("fill-etcd", NOTHING, some_member, fill_etcd, 14, needs="etcd"),
        Fault("kill-agent", NO_RESTART, some_node, kill_agent, 8),
        Fault("kill-host", NO_RESTART, some_node, kill_host, 8),
        Fault("restart-agent", NO_RESTART, some_node, restart_agent, 6),
        Fault("stop-agent", NO_RESTART, some_unseen_node, stop_agent, 30),
        Fault("stop-agent-short", NOTHING, some_node, stop_agent_short, 4),
        Fault("cut-agent", NO_RESTART, some_unseen_node, cut_agent, 25),
        Fault("cut-agent-short", NOTHING, some_node, cut_agent_short, 6),
        Fault("cut-agent-up", NO_RESTART, some_unseen_node, cut_agent_up, 25),
        Fault("cut-agent-down", NO_RESTART, some_unseen_node, cut_agent_down, 25),
        Fault("lose-agent", NO_RESTART, some_unseen_node, lose_agent, 25),
        Fault("slow-agent", NOTHING, some_node, slow_agent, 14),
        Fault("kill-runner", NO_RESTART, some_node, kill_runner, 8),
        Fault("stop-runner", NOTHING, some_node, stop_runner, 12),
        Fault("kill-worker", ONE_RESTART, some_node, kill_worker, 4),
        Fault("stop-worker", NOTHING, some_node, stop_worker, 22),
        Fault("kill-store-host", NO_RESTART, store_host_node, kill_store_host, 10, needs="torch"),
        Fault("stop-store-host", NOTHING, store_host_node, stop_store_host, 22, needs="torch"),
        Fault("cut-host", NO_RESTART, some_unseen_node, cut_host, 25),
        Fault("cut-peers", NOTHING, two_nodes, cut_peers, 25),
        Fault("lose-peers", NOTHING, two_nodes, lose_peers, 20),
        Fault("slow-peers", NOTHING, two_nodes, slow_peers, 14),
    )
}
