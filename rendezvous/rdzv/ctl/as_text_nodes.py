"""Formats nodes as text for people: which take jobs, and which are drained or cordoned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rdzv.core.words import counted, duration, size_text
from rdzv.ctl.layout import Cell, Page
from rdzv.runtime.log_format import harmless
from rdzv.view.answers import Gpu, Node

_UNKNOWN = "-"
_STATE_STYLES = {
    **{"connected": "green", "away": "yellow", "gone": "red"},
    **{"draining": "yellow", "drained": "yellow"},
}
_MOST_JOBS = 3
"""The maximum number of a node's jobs named on its line in the table."""
_LEAST_REASON = 16


def nodes(server: str, found: Sequence[Node], page: Page, store_away: str | None = None) -> str:
    """Format the nodes, one per line, sorted by name; if changes are not being stored, say why."""
    away = page.sentence(store_away) if store_away else []
    if not found:
        return "\n".join([f"no nodes at {server}", *away])
    # If all reasons are of one kind, the header names it; otherwise each row does.
    unusable = "UNUSABLE" if any(n.quarantine or n.unhealthy for n in found) else "CORDONED"
    header = ("NODE", "STATE", "FOR", "PROGRAM", "GPUS_FREE", "CPUS", "MEMORY", "LABELS", "JOBS")
    rows = [
        (*_row(node), Cell(_unusable(node, unusable), "yellow"))
        for node in sorted(found, key=_by_name)
    ]
    expendable = ("MEMORY", "CPUS", "LABELS", "PROGRAM", "FOR")
    lines = page.table(
        (*header, unusable), rows, expendable=expendable, one_line=True, least=_LEAST_REASON
    )
    return "\n".join([*lines, *away])


def node(found: Node, page: Page) -> str:
    """Format everything known about one node."""
    since = ""
    if found.state_age_ms is not None:
        since = f"for {duration(found.state_age_ms)}, since {page.ago(found.state_age_ms)}"
    marks = [found.drain] if found.drain else []
    marks += ["cordoned"] * _is_cordoned(found)
    marks += ["quarantined"] * bool(found.quarantine) + ["unhealthy"] * bool(found.unhealthy)
    mark = Cell(", ".join(marks), "yellow")
    state = Cell(found.state or _UNKNOWN, _STATE_STYLES.get(found.state, ""))
    lines = [page.line(Cell(found.node_id, "bold"), state, Cell(since), mark)]
    lines += [line for label, value in _facts(found, page) for line in page.fact(label, value)]
    if found.jobs:
        rows = [(Cell(job.rdzv_id), Cell(str(job.gpus)), Cell(job.state)) for job in found.jobs]
        lines += ["", *page.table(("JOB", "GPUS", "STATE"), rows)]
    return "\n".join(lines)


def cordoned(found: Node) -> str:
    """Report that a node is cordoned, and which jobs it still has."""
    left = f"; it has {_jobs(found)}" if found.jobs else ""
    return f"{harmless(found.node_id)} is cordoned{harmless(left)}"


def uncordoned(found: Node) -> str:
    """Report that a node is uncordoned, and whether submitted jobs are placed on it again."""
    return f"{harmless(found.node_id)} is uncordoned: {_takes_jobs(found)}"


def drained(found: Node) -> str:
    """Report the progress of a node's drain, and which jobs it still has."""
    name = harmless(found.node_id)
    if found.drain is None:
        return f"{name} is no longer drained: the drain was lifted meanwhile"
    if not found.jobs:
        return f"{name} is drained"
    left = duration(found.drain_left_ms or 0)
    return f"{name} is draining; its workers have {left}, and it has {harmless(_jobs(found))}"


def undrained(found: Node) -> str:
    """Report that a node's drain is lifted, and whether submitted jobs are placed on it again."""
    name = harmless(found.node_id)
    if found.drain is not None:
        why = f": {harmless(found.drain_reason)}" if found.drain_reason else ""
        return f"{name} is about to leave by itself{why}"
    if found.cordoned:
        why = _because(found.cordon_reason)
        return (
            f"{name} is not drained, but still cordoned{why}, so no submitted job is placed on it; "
            f"`rdzvctl uncordon {name}` lifts that"
        )
    return f"the drain of {name} is lifted: {_takes_jobs(found)}"


def _takes_jobs(node: Node) -> str:
    """Describe whether submitted jobs are placed on a node and, if not, why."""
    if node.drain is not None:
        why = _because(node.drain_reason)
        return f"it is about to leave by itself, so no submitted job is placed on it{why}"
    if node.quarantine or node.unhealthy:
        what = "quarantined" if node.quarantine else "unhealthy"
        why = _because(node.quarantine or node.unhealthy)
        return f"it is {what}, so no submitted job is placed on it{why}"
    if node.resources is not None:
        return "submitted jobs are placed on it again"
    if node.state == "connected":
        program = harmless(node.program or "agent")
        return f"its {program} takes no submitted jobs, though"
    return "submitted jobs are placed on it when it is connected"


def _because(reason: str | None) -> str:
    return f" ({harmless(reason)})" if reason else ""


def _is_cordoned(node: Node) -> bool:
    """Return whether a node has a cordon, besides any drain."""
    return node.cordoned_besides or (node.cordoned and node.drain is None)


def _why_taken_out(node: Node) -> str:
    """Describe a node's drain, with the time left, or its cordon; empty if it has neither."""
    if node.drain == "draining":
        left = duration(node.drain_left_ms or 0)
        why = f": {node.drain_reason}" if node.drain_reason else ""
        return (f"leaves in {left}" if node.drain_left_ms else "the deadline has passed") + why
    if node.drain is not None:
        return node.drain_reason or "yes"
    return node.cordon_reason or "yes" if node.cordoned else ""


def _facts(found: Node, page: Page) -> list[tuple[str, Cell]]:
    version = f" {found.agent_version}" if found.agent_version else ""
    facts = [
        ("program", Cell(f"{found.program or _UNKNOWN}{version}")),
        ("address", Cell(found.address or _UNKNOWN)),
    ]
    if found.drain is not None:
        by = "an operator" if found.drained_by_operator else "itself"
        facts.append((found.drain, Cell(f"by {by}, {_why_taken_out(found)}", "yellow")))
    if _is_cordoned(found):
        at = "" if found.cordon_age_ms is None else f", since {page.ago(found.cordon_age_ms)}"
        why = f", {found.cordon_reason}" if found.cordon_reason else ""
        facts.append(("cordoned", Cell(f"nothing is placed on it{at}{why}", "yellow")))
    if found.metrics:
        facts.append(("metrics", Cell(f"http://{found.metrics}/metrics")))
    if found.quarantine:
        at = page.ago(found.quarantine_age_ms or 0)
        left = duration(found.quarantine_left_ms or 0)
        text = f"nothing is placed on it for {left} more, since {at}: {found.quarantine}"
        facts.append(("quarantined", Cell(text, "yellow")))
    if found.unhealthy:
        text = f"since {page.ago(found.unhealthy_age_ms or 0)}: {found.unhealthy}"
        facts.append(("unhealthy", Cell(text, "yellow")))
    resources = found.resources
    if resources is None:
        return [*facts, ("takes", Cell("no submitted jobs"))]
    capacity = counted(resources.capacity, "job") if resources.capacity else _UNKNOWN
    return [
        *facts,
        ("takes", Cell(f"{capacity} at once")),
        ("GPUs", Cell(_gpus(found, resources.gpus))),
        ("CPUs", Cell(_number(resources.cpus))),
        ("memory", Cell(_bytes(resources.memory_bytes))),
        ("labels", Cell(_labels(resources.labels) or "none")),
        ("topology", Cell(resources.topology or _UNKNOWN)),
    ]


def _gpus(found: Node, gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "none"
    kinds = Counter((gpu.name or "GPU", gpu.memory_bytes) for gpu in gpus)
    each = [
        f"{number} x {name}" + (f" of {size_text(size)}" if size else "")
        for (name, size), number in kinds.items()
    ]
    return f"{_number(found.gpus_free)} of {len(gpus)} free: {', '.join(each)}"


def _row(node: Node) -> tuple[Cell, ...]:
    resources = node.resources
    shows_drain = node.drain is not None and node.state == "connected"
    age_ms = node.drain_age_ms if shows_drain else node.state_age_ms
    return (
        Cell(node.node_id),
        _state(node),
        Cell(_UNKNOWN if age_ms is None else duration(age_ms)),
        Cell(node.program or _UNKNOWN),
        Cell(f"{_number(node.gpus_free)}/{len(resources.gpus)}" if resources else _UNKNOWN),
        Cell(_number(resources.cpus) if resources else _UNKNOWN),
        Cell(_bytes(resources.memory_bytes) if resources else _UNKNOWN),
        Cell(_labels(resources.labels) if resources else ""),
        Cell(_jobs(node)),
    )


def _unusable(node: Node, header: str) -> str:
    """Return the reason why nothing is placed on a node, as text for the column `header`."""
    if header == "CORDONED":
        besides = f"; cordoned {node.cordon_reason or ''}".rstrip() if node.cordoned_besides else ""
        return _why_taken_out(node) + besides
    whys = []
    if node.drain is not None:
        whys.append(f"{node.drain}: {_why_taken_out(node)}")
    if _is_cordoned(node):
        whys.append("cordoned" + (f" {node.cordon_reason}" if node.cordon_reason else ""))
    if node.quarantine:
        whys.append(f"quarantined: {node.quarantine}")
    if node.unhealthy:
        whys.append(f"unhealthy: {node.unhealthy}")
    return "; ".join(whys)


def _jobs(node: Node) -> str:
    """Name a node's jobs, marking those that are not running yet or are still holding resources."""
    named = [
        job.rdzv_id + (f" ({job.state})" if job.state in ("placed", "holding") else "")
        for job in node.jobs[:_MOST_JOBS]
    ]
    more = len(node.jobs) - len(named)
    return ", ".join([*named, *([f"{more} more"] if more else [])]) or _UNKNOWN


def _by_name(node: Node) -> list[tuple[int, str]]:
    """Return a sort key that puts n2 before n10."""
    parts = re.split(r"([0-9]+)", node.node_id)
    return [(int(part[:18]), part) if part.isdecimal() else (-1, part) for part in parts]


def _state(node: Node) -> Cell:
    """Return the cell for a node's state; a drain replaces `connected`."""
    state = node.drain if node.drain is not None and node.state == "connected" else node.state
    return Cell(state or _UNKNOWN, _STATE_STYLES.get(state, ""))


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _number(number: int | None) -> str:
    return _UNKNOWN if number is None else str(number)


def _bytes(number: int | None) -> str:
    return _UNKNOWN if number is None else size_text(number)
