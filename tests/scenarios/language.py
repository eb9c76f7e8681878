"""The language of scenarios: commands and answers as lines of text.

A command is a verb, a node and its arguments: `fail n1 round=0 rank=3 exit=1 "ValueError"`. `n1#2`
is the second instance (incarnation 2) of n1; plain `n1` is the first. Durations carry their unit:
`250ms`, `5s`, `2min`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rdzv.core import commands, events, model
from rdzv.core.fleet import nodes
from rdzv.core.fleet.nodes import LeaseRules, NodesEvent
from rdzv.core.kept_ranks import NotKept
from rdzv.core.root_cause import describe_failure
from rdzv.view.answers import JobStatus

_COUNTER_BITS = 32
_UNITS_MS = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000}


class ScenarioError(Exception):
    """A line of a scenario cannot be read."""


def read_ms(text: str) -> int:
    """Read a duration.

    >>> [read_ms(text) for text in ("250ms", "1.5s", "10min")]
    [250, 1500, 600000]
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min|h)", text)
    if not match:
        raise ScenarioError(f"{text} is no duration; write 250ms, 5s, 10min")
    return round(float(match[1]) * _UNITS_MS[match[2]])


def write_ms(ms: int) -> str:
    """Write a duration so that `read_ms` reads it.

    >>> [write_ms(ms) for ms in (250, 1500, 600000, 0)]
    ['250ms', '1.5s', '600s', '0s']
    """
    if 0 < ms < 1_000:
        return f"{ms}ms"
    return f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"


# ------------------------------------------------------------------ a line, taken apart


@dataclass
class Line:
    """One command as written: a verb, plain words, and `key=value` pairs."""

    verb: str
    words: list[str] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Line:
        """Split a line into words; quoted text is one word."""
        tokens = shlex.split(text)
        line = cls(tokens[0])
        for token in tokens[1:]:
            key, equals, value = token.partition("=")
            if equals and key.isidentifier():
                line.pairs[key] = value
            else:
                line.words.append(token)
        return line

    def word(self, default: str | None = None) -> str:
        """Take the next plain word."""
        if self.words:
            return self.words.pop(0)
        if default is None:
            raise ScenarioError(f"{self.verb} lacks a word")
        return default

    def take(self, key: str, default: str) -> str:
        return self.pairs.pop(key, default)

    def number(self, key: str, default: int) -> int:
        return int(self.take(key, str(default)))

    def ms(self, key: str, default_ms: int) -> int:
        return read_ms(self.take(key, write_ms(default_ms)))

    def finish(self) -> None:
        """Refuse unused words: a misspelt word must not pass unnoticed."""
        if self.words or self.pairs:
            raise ScenarioError(f"{self.verb} does not know {self.words or self.pairs}")


# ------------------------------------------------------------------ settings and tuning


def read_settings(line: Line, default: model.Settings) -> model.Settings:
    """Take the settings of a job from a line; missing ones are as in `default`."""
    bounds = line.take("nodes", f"{default.min_nodes}:{default.max_nodes}").partition(":")
    return model.Settings(
        min_nodes=int(bounds[0]),
        max_nodes=int(bounds[2] or bounds[0]),
        max_restarts=_read_budget(line, "max_restarts", default.max_restarts),
        join_timeout_ms=line.ms("join_timeout", default.join_timeout_ms),
        last_call_timeout_ms=line.ms("last_call", default.last_call_timeout_ms),
        scale_up=model.ScaleUp(line.take("scale_up", default.scale_up)),
        restart_window_ms=line.ms("restart_window", default.restart_window_ms),
        scale_up_after_ms=line.ms("scale_up_after", default.scale_up_after_ms),
        restart_backoff_ms=line.ms("restart_backoff", default.restart_backoff_ms),
        restart_backoff_max_ms=line.ms("restart_backoff_max", default.restart_backoff_max_ms),
        max_preemptions=_read_budget(line, "max_preemptions", default.max_preemptions),
        max_store_failures=_read_budget(line, "max_store_failures", default.max_store_failures),
        no_progress_restarts=line.number("no_progress_restarts", default.no_progress_restarts),
        restart_on=_read_ends(line, "restart_on", default.restart_on),
        no_restart_on=_read_ends(line, "no_restart_on", default.no_restart_on),
    )


def _read_ends(line: Line, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, line.take(key, ",".join(default)).split(",")))


def _read_budget(line: Line, key: str, default: int | None) -> int | None:
    value = line.take(key, f"{default}")
    return None if value == "None" else int(value)


def write_settings(settings: model.Settings, default: model.Settings) -> list[str]:
    """Write the differences from `default`, so that `read_settings` reads them."""
    written = []
    if (settings.min_nodes, settings.max_nodes) != (default.min_nodes, default.max_nodes):
        written.append(f"nodes={settings.min_nodes}:{settings.max_nodes}")
    budgets = ("max_restarts", "max_preemptions", "max_store_failures", "no_progress_restarts")
    for name in budgets:
        if getattr(settings, name) != getattr(default, name):
            written.append(f"{name}={getattr(settings, name)}")
    for name in ("restart_on", "no_restart_on"):
        if getattr(settings, name) != getattr(default, name):
            written.append(f"{name}={','.join(getattr(settings, name))}")
    if settings.scale_up != default.scale_up:
        written.append(f"scale_up={settings.scale_up}")
    durations = {"join_timeout": "join_timeout_ms", "last_call": "last_call_timeout_ms"}
    durations["restart_window"] = "restart_window_ms"
    durations["scale_up_after"] = "scale_up_after_ms"
    durations["restart_backoff"] = "restart_backoff_ms"
    durations["restart_backoff_max"] = "restart_backoff_max_ms"
    for word, name in durations.items():
        if getattr(settings, name) != getattr(default, name):
            written.append(f"{word}={write_ms(getattr(settings, name))}")
    return written


_T = TypeVar("_T", model.Tuning, LeaseRules)


_TUNING_WORDS: Mapping[type, Mapping[str, str]] = {
    model.Tuning: {"forms_from": "forms_from_ms", "takeover_grace": "takeover_grace_ms"},
    LeaseRules: {
        "lease": "duration_ms",
        "lease_nodes": "nodes",
        "lease_max": "longest_ms",
        "lease_nodes_max": "longest_nodes",
        "takeover_grace": "takeover_grace_ms",
    },
}


def read_tuning(line: Line, kind: type[_T]) -> _T:
    """Take the server's own timings."""
    given = {}
    for word, name in _TUNING_WORDS[kind].items():
        if word in line.pairs:
            value = line.pairs[word]
            given[name] = read_ms(value) if name.endswith("_ms") else int(value)
    return kind(**given)


def forget_tuning(line: Line, kind: type[_T]) -> None:
    """Remove the words that `read_tuning` has read; two kinds of tuning share some."""
    for word in _TUNING_WORDS[kind]:
        line.pairs.pop(word, None)


# ------------------------------------------------------------------ commands


@dataclass(frozen=True)
class Said:
    """Context of a command that its line does not contain."""

    settings: model.Settings
    run: str
    incarnation: Callable[[str], int]
    now_ms: int


def speaker(token: str, incarnation: Callable[[str], int]) -> tuple[str, int]:
    """Read `n1`, `n1#2`, or `n1#1.2` for the second instance under leadership 1."""
    node_id, hash_, number = token.partition("#")
    if not hash_:
        return node_id, incarnation(node_id)
    leadership, dot, counter = number.rpartition(".")
    return node_id, (int(leadership) << _COUNTER_BITS) + int(counter) if dot else int(number)


def read_command(line: Line, said: Said) -> commands.Command:
    """Read one command to a rendezvous."""
    if line.verb == "tick":
        return commands.Tick()
    if line.verb in ("stop", "restart", "scale"):
        return _read_operator(line, said)
    if line.verb in ("submit", "place", "withdraw", "bar", "decline", "give-up"):
        return _read_submitted(line, said)
    reader = _READERS.get(line.verb)
    if reader is None:
        raise ScenarioError(f"no such command: {line.verb}")
    node_id, incarnation = speaker(line.word(), said.incarnation)
    command = reader(line, node_id, incarnation, said)
    line.finish()
    return command


def _read_offer(line: Line, node_id: str) -> model.Offer:
    machine = line.take("machine", f"machine-of-{node_id}")
    return model.Offer(
        address=line.take("address", f"{node_id}.net"),
        local_world_size=line.number("workers", 1),
        role=line.take("role", "default"),
        topology=line.take("topology", ""),
        host_name=line.take("host_name", ""),
        machine=machine,
        store_port=line.number("port", 29_500),
        can_host_store=line.take("store", "yes") == "yes",
        shutdown_timeout_ms=line.ms("shutdown_timeout", 30_000),
    )


def _read_join(line: Line, node_id: str, incarnation: int, said: Said) -> commands.Command:
    return commands.Join(
        node_id=node_id,
        incarnation=incarnation,
        run=line.take("run", ""),
        settings=read_settings(line, said.settings),
        offer=_read_offer(line, node_id),
        left_round=int(line.pairs.pop("left_round")) if "left_round" in line.pairs else None,
        refuse_reuse=line.take("reuse", "true") == "false",
        moved=_read_moved(line),
        kept=_read_kept(line),
        snapshots=_read_snapshots(line),
        preparing=line.take("preparing", "false") == "true",
    )


def _read_moved(line: Line) -> model.Moved:
    """Read the workers' progress: `step=120 snapshot=new`."""
    step = int(line.pairs.pop("step")) if "step" in line.pairs else None
    return model.Moved(step, line.take("snapshot", "same") == "new")


def _read_stopped(line: Line, node_id: str, incarnation: int, said: Said) -> commands.Command:
    return commands.Join(
        node_id=node_id,
        incarnation=incarnation,
        run=line.take("run", said.run),
        settings=said.settings,
        left_round=line.number("round", 0),
        failures=_read_failures(line, said),
        moved=_read_moved(line),
        kept=_read_kept(line),
        snapshots=_read_snapshots(line),
        offer=_read_offer(line, node_id),
    )


def _read_kept(line: Line) -> tuple[model.KeptWorker, ...]:
    """Read parked workers, LOCAL_RANK and sealed steps: `kept=0:7,1:7torn,2`."""
    kept = []
    for word in filter(None, line.take("kept", "").split(",")):
        local_rank, _, step = word.removesuffix("torn").partition(":")
        torn = word.endswith("torn")
        kept.append(model.KeptWorker(int(local_rank), int(step) if step else None, torn))
    return tuple(kept)


def write_kept(kept: tuple[model.KeptWorker, ...]) -> str:
    """Write parked workers as `_read_kept` reads them."""
    return ",".join(
        f"{one.local_rank}"
        + (f":{one.step}" if one.step is not None else "")
        + ("torn" if one.torn else "")
        for one in kept
    )


def _read_snapshots(line: Line) -> tuple[model.Snapshot, ...]:
    """Read what a node holds: lineage, step, part of how many, of how many workers: `3@50:0/2of4`.

    It is the whole state if no part is named.
    """
    held = []
    for local_rank, word in enumerate(filter(None, line.take("snapshots", "").split(","))):
        at, _, part = word.partition(":")
        lineage, _, step = at.partition("@")
        shard, _, shards = (part or "0/1").partition("/")
        mark = model.SnapshotMark(int(lineage), int(step), "a", int(shards))
        held.append(model.Snapshot(local_rank, mark, int(shard)))
    return tuple(held)


def write_snapshots(held: tuple[model.Snapshot, ...]) -> str:
    """Write a node's snapshots as `_read_snapshots` reads them."""
    return ",".join(
        f"{mark.lineage}@{mark.step}:{one.shard}/{mark.shards}"
        for one in held
        for mark in (one.mark,)
    )


def _read_failures(line: Line, said: Said) -> tuple[model.Failure, ...]:
    """Read `rank=3 exit=1 "message" traceback=... age=5ms`; without a rank there is none."""
    if "rank" not in line.pairs:
        return ()
    return (
        model.Failure(
            rank=line.number("rank", 0),
            local_rank=line.number("local_rank", 0),
            pid=line.number("pid", 4711),
            exit_code=int(line.pairs.pop("exit")) if "exit" in line.pairs else None,
            signal=int(line.pairs.pop("signal")) if "signal" in line.pairs else None,
            message=line.word(""),
            traceback=line.take("traceback", ""),
            suspect=line.take("suspect", "no") == "yes",
            at_ms=said.now_ms - line.ms("age", 0),
        ),
    )


def _read_fail(line: Line, node_id: str, incarnation: int, said: Said) -> commands.Command:
    run, number = line.take("run", said.run), line.number("round", 0)
    return commands.Fail(node_id, incarnation, run, number, _read_failures(line, said))


def _read_leave(line: Line, node_id: str, incarnation: int, said: Said) -> commands.Command:
    cause = model.LeaveCause(line.take("cause", model.LeaveCause.SIGNAL))
    run = line.take("run", said.run)
    number, exited_zero = line.number("left_round", -1), line.number("exited_zero", 0) == 1
    reason = line.word("its agent received SIGTERM")
    left_round = None if number < 0 else number
    return commands.Leave(node_id, incarnation, run, cause, reason, left_round, exited_zero)


def _read_stuck(line: Line, node_id: str, incarnation: int, said: Said) -> commands.Command:
    pids = tuple(int(pid) for pid in line.take("pids", "4711").split(","))
    run = line.take("run", said.run)
    return commands.ReportStuck(node_id, incarnation, run, line.number("round", 0), pids)


def _read_store_host(line: Line, node_id: str, incarnation: int, said: Said) -> commands.Command:
    run, number = line.take("run", said.run), line.number("round", 0)
    return commands.ReportStoreHost(node_id, incarnation, run, number, line.word("it exited 1"))


def _read_away(line: Line, node_id: str, incarnation: int, said: Said) -> commands.Command:
    for_ms, firm = line.ms("for", 5_000), line.word("") == "firm"
    return commands.MarkAway(node_id, incarnation, said.now_ms + for_ms, firm)


def _about_round(kind: type[commands.Resume] | type[commands.Succeed]) -> _Reader:
    def read(line: Line, node_id: str, incarnation: int, said: Said) -> commands.Command:
        return kind(node_id, incarnation, line.take("run", said.run), line.number("round", 0))

    return read


def _read_operator(line: Line, said: Said) -> commands.Command:
    run = line.take("run", said.run)
    bounds = line.word().partition(":") if line.verb == "scale" else ("", "", "")
    number, reason = line.number("round", 0), line.word("an operator asked for it")
    line.finish()
    match line.verb:
        case "stop":
            return commands.Stop(run, reason)
        case "restart":
            return commands.Restart(run, number, reason)
        case _:
            return commands.Scale(run, int(bounds[0]), int(bounds[2]), reason)


def _read_submitted(line: Line, said: Said) -> commands.Command:
    if line.verb == "submit":
        run, by = line.take("run", "run-1"), line.take("by", "ada")
        settings = read_settings(line, said.settings)
        line.finish()
        return commands.Submit(run, settings, model.JobSpec(args=("train.py",)), by)
    run = line.take("run", said.run)
    node_ids = () if line.verb == "give-up" else tuple(line.word().split(","))
    reason = line.word("it is so")
    line.finish()
    match line.verb:
        case "place":
            return commands.Place(run, node_ids)
        case "withdraw":
            return commands.Withdraw(run, node_ids, reason)
        case "bar":
            names = () if node_ids == ("none",) else node_ids
            return commands.Bar(tuple((node_id, reason) for node_id in names))
        case "decline":
            return commands.Decline(node_ids[0], run, reason)
        case _:
            return commands.GiveUp(run, reason)


_Reader = Callable[[Line, str, int, Said], commands.Command]

_READERS: Mapping[str, _Reader] = {
    "join": _read_join,
    "stopped": _read_stopped,
    "resume": _about_round(commands.Resume),
    "fail": _read_fail,
    "succeed": _about_round(commands.Succeed),
    "leave": _read_leave,
    "stuck": _read_stuck,
    "store-host": _read_store_host,
    "away": _read_away,
    "back": lambda line, node_id, incarnation, said: commands.MarkBack(node_id, incarnation),
    "heard": lambda line, node_id, incarnation, said: commands.MarkHeard(node_id),
    "lost": lambda line, node_id, incarnation, said: commands.MarkLost(
        node_id, incarnation, line.word("lease expired")
    ),
}


def write_command(
    command: commands.Command, default: model.Settings, now_ms: int, name: str
) -> str:
    """Write a command so that `read_command` reads it; `name` is its speaker's."""
    match command:
        case commands.Tick():
            return "tick"
        case commands.Stop():
            return f"stop run={command.run}"
        case commands.Restart():
            return f"restart run={command.run} round={command.round}"
        case commands.Scale():
            return f"scale {command.min_nodes}:{command.max_nodes} run={command.run}"
        case commands.Submit():
            words = ["submit", f"run={command.run}", *write_settings(command.settings, default)]
            return " ".join(words)
        case commands.Place():
            return f"place {','.join(command.node_ids)} run={command.run}"
        case commands.Withdraw():
            return f'withdraw {",".join(command.node_ids)} run={command.run} "{command.reason}"'
        case commands.Bar():
            # One reason stands for all of them, as they are read.
            names = ",".join(node_id for node_id, _ in command.barred) or "none"
            reasons = [reason for _, reason in command.barred] or ["nobody is"]
            return f'bar {names} "{reasons[0]}"'
        case commands.Decline():
            return f'decline {command.node_id} run={command.run} "{command.reason}"'
        case commands.GiveUp():
            return f'give-up run={command.run} "{command.reason}"'
        case commands.Join():
            words = ["join", name, *([f"run={command.run}"] if command.run else [])]
            words += [f"left_round={command.left_round}"] if command.left_round is not None else []
            words += [f"workers={command.offer.local_world_size}"]
            words += (
                [f"step={command.moved.furthest_step}"]
                if command.moved.furthest_step is not None
                else []
            )
            words += ["snapshot=new"] if command.moved.snapshot_changed else []
            words += [f"kept={write_kept(command.kept)}"] if command.kept else []
            if command.snapshots:
                words += [f"snapshots={write_snapshots(command.snapshots)}"]
            return " ".join(words + write_settings(command.settings, default))
        case commands.Resume() | commands.Succeed():
            verb = type(command).__name__.lower()
            return f"{verb} {name} run={command.run} round={command.round}"
        case commands.Fail():
            first = command.failures[0] if command.failures else None
            what = f" rank={first.rank} exit={first.exit_code}" if first else ""
            what += " suspect=yes" if first and first.suspect else ""
            return f"fail {name} run={command.run} round={command.round}{what}"
        case commands.Leave():
            left = "" if command.left_round is None else f" left_round={command.left_round}"
            return f"leave {name} run={command.run}{left}"
        case commands.ReportStuck():
            return f"stuck {name} run={command.run} round={command.round}"
        case commands.ReportStoreHost():
            return f"store-host {name} run={command.run} round={command.round}"
        case commands.MarkAway():
            firm = " firm" if command.firm else ""
            return f"away {name}{firm} for={command.until_ms - now_ms}ms"
        case commands.MarkBack():
            return f"back {name}"
        case commands.MarkHeard():
            return f"heard {command.node_id}"
        case commands.MarkLost():
            return f'lost {name} "{command.reason}"'


# ------------------------------------------------------------------ answers


def write_events(events: tuple[events.Event | NodesEvent, ...]) -> str:
    """Describe an event in one line."""
    return " · ".join(_write_event(event) for event in events) or "-"


def _write_event(event: events.Event | NodesEvent) -> str:
    text = f"{type(event).__name__} {_what(event)}".rstrip()
    # Events of the nodes core are not about this job only.
    return f"[{text}]" if isinstance(event, NodesEvent) else text


def _what(event: events.Event | NodesEvent) -> str:
    match event:
        case events.RunBegan():
            return f"{event.run}: {event.reason}"
        case events.NodeJoined():
            return name(event.node_id, event.incarnation)
        case events.NodeStopped() | events.NodeSucceeded():
            return f"{event.node_id} round={event.round}"
        case events.NodeLeaving() | events.NodeLeft() | events.NodeLost():
            return f"{event.node_id}: {event.reason}"
        case events.NodeWentAway():
            return f"{event.node_id} for {write_ms(event.for_ms)}"
        case events.NodeCameBack():
            return f"{event.node_id} after {write_ms(event.after_ms)}"
        case events.NodeStuck():
            return f"{event.node_id} round={event.round}: {event.reason}"
        case events.WorkerFailed():
            return f"round={event.round} {write_failure(event.failure)}"
        case events.LastCallBegan():
            return f"{event.nodes} nodes, {write_ms(event.for_ms)}"
        case events.RoundCompleted():
            not_loaded = f" (not loaded: {event.not_loaded})" if event.not_loaded else ""
            return write_round(event.round) + _write_not_kept(event.not_kept) + not_loaded
        case events.RoundAdopted():
            return write_round(event.round)
        case events.NodeAdopted():
            return f"{event.node_id} round={event.round} GROUP_RANK={event.group_rank}"
        case events.JobScaled():
            return f"{event.min_nodes}:{event.max_nodes}: {event.reason}"
        case events.NodesPlaced():
            return ",".join(event.node_ids)
        case events.NodesWithdrawn():
            return f"{','.join(event.node_ids)}: {event.reason}"
        case events.NodeDeclined():
            return f"{event.node_id}: {event.reason}"
        case events.JobQueued():
            return event.reason
        case events.RoundEnded():
            broken = " (broken)" if event.end.broken else ""
            broken += "" if event.end.keep else " (keeps nobody)"
            return f"round={event.round}{broken} {event.end.cause}: {event.end.reason}"
        case events.RoundSettled():
            budget = f"{event.restarts} of {event.max_restarts} restarts"
            return f"round={event.round} {event.cause}: {event.reason}; {budget}"
        case events.RunEnded():
            again = " (try again)" if event.ended.retry_sensible else ""
            return f"{event.run} {event.ended.result}{again}: {event.ended.reason}"
        case _:
            return _what_of_node(event)


def _what_of_node(event: NodesEvent) -> str:
    who = name(event.node_id, event.incarnation)
    match event:
        case nodes.NodeConnected():
            old = event.replaced and write_incarnation(event.replaced)
            replaced = f" replaces #{old}" if old else ""
            stale = f" closes stream {event.stale_stream}" if event.stale_stream else ""
            return f"{who} lease={write_ms(event.lease_ms)}{replaced}{stale}"
        case nodes.LeaseGrown():
            return f"{who} lease={write_ms(event.lease_ms)}"
        case nodes.NodeAway():
            return f"{who} until {write_ms(event.until_ms)}" + (" firm" if event.firm else "")
        case nodes.NodeGivenUp():
            stale = f" closes stream {event.stream}" if event.stream else ""
            return f"{who}{stale}: {event.reason}"


def name(node_id: str, incarnation: int) -> str:
    """Write `n1`, `n1#2` or `n1#1.2`, as `speaker` reads it."""
    return node_id if incarnation == 1 else f"{node_id}#{write_incarnation(incarnation)}"


def write_incarnation(incarnation: int) -> str:
    leadership, counter = incarnation >> _COUNTER_BITS, incarnation % (1 << _COUNTER_BITS)
    return f"{leadership}.{counter}" if leadership else f"{counter}"


def write_failure(failure: model.Failure) -> str:
    at = f" at {write_ms(failure.at_ms)}"
    return describe_failure(failure) + at + (" with traceback" if failure.traceback else "")


def write_round(round_: model.Round) -> str:
    """Write `round=1 n1=0..7 n2=8..15 world_size=16 master=n1.net:29500`."""
    parts = [f"round={round_.number}"]
    roles = {participant.offer.role for participant in round_.participants}
    for p in round_.participants:
        last = p.rank_first + p.offer.local_world_size - 1
        ranks = f"{p.rank_first}..{last}" if last > p.rank_first else f"{p.rank_first}"
        role = f"({p.offer.role} {p.role_rank_first}/{p.role_world_size})" if len(roles) > 1 else ""
        kept = f"(kept {','.join(map(str, p.kept))})" if p.kept else ""
        charged = f"(charged {p.charged_suspects[0]})" if p.charged_suspects else ""
        parts.append(f"{name(p.node_id, p.incarnation)}={ranks}{role}{kept}{charged}")
    store = "" if round_.use_agent_store else " (store by RANK 0)"
    parts += [f"world_size={round_.world_size}"]
    if round_.restarts:
        parts += [f"restarts={round_.restarts}"]
    if round_.source is not None:
        parts += [f"source={round_.source} resume_step={round_.resume_step}"]
    if round_.snapshot is not None:
        word = "loads" if round_.snapshot_loads else "snapshots"
        parts += [f"{word}={round_.snapshot.lineage}@{round_.snapshot.step}"]
    return " ".join(parts) + f" master={round_.master_addr}:{round_.master_port}{store}"


def _write_not_kept(not_kept: tuple[NotKept, ...]) -> str:
    """Write ` (new: RANK 1 failed; RANK 4 torn)`."""
    whys = "; ".join(f"RANK {','.join(map(str, one.ranks))} {one.why}" for one in not_kept)
    return f" (new: {whys})" if whys else ""


def write_state(state: model.State) -> str:
    """Describe the state of the job and its nodes: `round 1 joining: n1, n2 stopping`."""
    membership = state.membership
    if not membership.run:
        return "vacant"
    if membership.ended is not None:
        return f"{membership.run} {membership.ended.result}"
    running = membership.round is not None and membership.round.live
    number = membership.round.number if running and membership.round else membership.next_round
    groups: dict[str, list[str]] = {}
    for node_id, seat in state.seats.items():
        doing = "succeeded" if seat.succeeded else "running" if running else "stopping"
        groups.setdefault("leaving" if seat.leaving else doing, []).append(node_id)
    groups["waiting"], groups["stuck"] = list(state.waiting), list(state.stuck)
    who = [", ".join(sorted(group)) + f" {word}" for word, group in groups.items() if group]
    if state.away:
        who.append(f"of these away: {', '.join(sorted(state.away))}")
    doing = "running" if running else "joining"
    return f"round {number} {doing}: " + ("; ".join(who) or "nobody")


def write_view(shown: JobStatus) -> list[str]:
    """Write the output of `status`."""
    written = [f"{shown.state}: {shown.reason.line}"]
    whys = shown.reason.by_node
    for node in shown.nodes:
        rank = "" if node.group_rank is None else f" GROUP_RANK {node.group_rank}"
        why = whys.pop(node.node_id, "")
        written.append(f"  {node.node_id} {node.state}{rank}: {why}".rstrip(": "))
    return written + [f"  {item}" for item in shown.reason.items if item.who in whys]
