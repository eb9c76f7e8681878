"""Formats nodes as text for people: which take jobs, and which are drained or cordoned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rdzv.core.fleet.node_resources import Gpu
from rdzv.core.words import counted, duration, size_text
from rdzv.ctl.as_text import UNKNOWN, number_text, state_cell
from rdzv.ctl.layout import Cell, Columns, Page, Text, bold
from rdzv.runtime.log_format import harmless
from rdzv.view.answers import Node, NodeJob

_MOST_JOBS = 3
_LEAST_REASON = 16


def nodes(server: str, found: Sequence[Node], page: Page, store_away: str | None = None) -> str:
    away = page.sentence(store_away) if store_away else []
    if not found:
        return "\n".join([f"no nodes at {server}", *away])
    # If all reasons are of one kind, the header names it; otherwise each row does.
    unusable = "UNUSABLE" if any(n.quarantine or n.unhealthy for n in found) else "CORDONED"
    columns: Columns[Node] = {
        "NODE": lambda node: node.node_id,
        "STATE": _state,
        "FOR": _age,
        "PROGRAM": lambda node: node.program or UNKNOWN,
        "GPUS_FREE": _gpus_free,
        "CPUS": lambda node: number_text(node.resources.cpus if node.resources else None),
        "MEMORY": lambda node: _bytes(node.resources.memory_bytes if node.resources else None),
        "LABELS": lambda node: _labels(node.resources.labels) if node.resources else "",
        "JOBS": _jobs,
        unusable: lambda node: Cell(_unusable(node, unusable), "yellow"),
    }
    expendable = ("MEMORY", "CPUS", "LABELS", "PROGRAM", "FOR")
    rows = sorted(found, key=lambda node: natural(node.node_id))
    lines = page.table(rows, columns, expendable=expendable, one_line=True, least=_LEAST_REASON)
    return "\n".join([*lines, *away])


def node(found: Node, page: Page) -> str:
    since = ""
    if found.state_age_ms is not None:
        since = f"for {duration(found.state_age_ms)}, since {page.ago(found.state_age_ms)}"
    marks = [found.drain] if found.drain else []
    marks += ["cordoned"] * _is_cordoned(found)
    marks += ["quarantined"] * bool(found.quarantine) + ["unhealthy"] * bool(found.unhealthy)
    mark = Cell(", ".join(marks), "yellow")
    name = bold(found.node_id)
    lines = [page.line(name, state_cell(found.state), since, mark), *_facts(found, page)]
    if found.jobs:
        columns: Columns[NodeJob] = {
            "JOB": lambda job: job.rdzv_id,
            "GPUS": lambda job: str(job.gpus),
            "STATE": lambda job: job.state,
        }
        lines += ["", *page.table(found.jobs, columns)]
    return "\n".join(lines)


def cordoned(found: Node, _: Page) -> str:
    left = f"; it has {_jobs(found)}" if found.jobs else ""
    return f"{harmless(found.node_id)} is cordoned{harmless(left)}"


def uncordoned(found: Node, _: Page) -> str:
    return f"{harmless(found.node_id)} is uncordoned: {_takes_jobs(found)}"


def drained(found: Node) -> str:
    name = harmless(found.node_id)
    if found.drain is None:
        return f"{name} is no longer drained: the drain has been lifted"
    if not found.jobs:
        return f"{name} is drained"
    left = duration(found.drain_left_ms or 0)
    return f"{name} is draining; its workers have {left}, and it has {harmless(_jobs(found))}"


def undrained(found: Node, _: Page) -> str:
    name = harmless(found.node_id)
    if found.drain is not None:
        why = f": {harmless(found.drain_reason)}" if found.drain_reason else ""
        return f"{name} is about to leave by itself{why}"
    if found.cordoned:
        why = _because(found.cordon_reason)
        return (
            f"{name} is not drained, but still cordoned{why}, so it gets no submitted jobs; "
            f"`rdzvctl uncordon {name}` lifts that"
        )
    return f"the drain of {name} is lifted: {_takes_jobs(found)}"


def _takes_jobs(node: Node) -> str:
    if node.drain is not None:
        why = _because(node.drain_reason)
        return f"it is about to leave by itself, so it gets no submitted jobs{why}"
    if node.quarantine or node.unhealthy:
        what = "quarantined" if node.quarantine else "unhealthy"
        why = _because(node.quarantine or node.unhealthy)
        return f"it is {what}, so it gets no submitted jobs{why}"
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
    if node.drain == "draining":
        left = duration(node.drain_left_ms or 0)
        why = f": {node.drain_reason}" if node.drain_reason else ""
        return (f"leaves in {left}" if node.drain_left_ms else "the deadline has passed") + why
    if node.drain is not None:
        return node.drain_reason or "yes"
    return node.cordon_reason or "yes" if node.cordoned else ""


def _facts(found: Node, page: Page) -> list[str]:
    version = f" {found.agent_version}" if found.agent_version else ""
    facts: dict[str, Text] = {
        "program": f"{found.program or UNKNOWN}{version}",
        "address": found.address or UNKNOWN,
    }
    if found.drain is not None:
        at = f"since {page.ago(found.drain_age_ms or 0)}, "
        by = "" if found.drained_by_operator else "by itself, "
        facts[found.drain] = Cell(f"{at}{by}{_why_taken_out(found)}", "yellow")
    if _is_cordoned(found):
        at = "" if found.cordon_age_ms is None else f", since {page.ago(found.cordon_age_ms)}"
        why = f", {found.cordon_reason}" if found.cordon_reason else ""
        facts["cordoned"] = Cell(f"nothing is placed on it{at}{why}", "yellow")
    if found.quarantine:
        at = page.ago(found.quarantine_age_ms or 0)
        left = duration(found.quarantine_left_ms or 0)
        text = f"nothing is placed on it for {left} more, since {at}: {found.quarantine}"
        facts["quarantined"] = Cell(text, "yellow")
    if found.unhealthy:
        text = f"since {page.ago(found.unhealthy_age_ms or 0)}: {found.unhealthy}"
        facts["unhealthy"] = Cell(text, "yellow")
    if found.jobs and found.without_it:
        facts["without it"] = found.without_it
    resources = found.resources
    if resources is None:
        return page.facts({**facts, "takes": "no submitted jobs"})
    capacity = counted(resources.capacity, "job") if resources.capacity else UNKNOWN
    return page.facts(
        {
            **facts,
            "takes": f"{capacity} at once",
            "GPUs": _gpus(found, resources.gpus),
            "CPUs": number_text(resources.cpus),
            "memory": _bytes(resources.memory_bytes),
            "labels": _labels(resources.labels) or "none",
            "topology": resources.topology or UNKNOWN,
        }
    )


def _gpus(found: Node, gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "none"
    kinds = Counter((gpu.name or "GPU", gpu.memory_bytes) for gpu in gpus)
    each = [
        f"{number} x {name}" + (f" of {size_text(size)}" if size else "")
        for (name, size), number in kinds.items()
    ]
    return f"{number_text(found.gpus_free)} of {len(gpus)} free: {', '.join(each)}"


def _age(node: Node) -> str:
    shows_drain = node.drain is not None and node.state == "connected"
    age_ms = node.drain_age_ms if shows_drain else node.state_age_ms
    return UNKNOWN if age_ms is None else duration(age_ms)


def _gpus_free(node: Node) -> str:
    if node.resources is None:
        return UNKNOWN
    return f"{number_text(node.gpus_free)}/{len(node.resources.gpus)}"


def _unusable(node: Node, header: str) -> str:
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
    named = [
        job.rdzv_id + (f" ({job.state})" if job.state in ("placed", "holding") else "")
        for job in node.jobs[:_MOST_JOBS]
    ]
    more = len(node.jobs) - len(named)
    return ", ".join([*named, *([f"{more} more"] if more else [])]) or UNKNOWN


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts n2 before n10."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part[:18]), part) if part.isdecimal() else (-1, part) for part in parts]


def _state(node: Node) -> Cell:
    """Return the cell for a node's state; a drain replaces `connected`."""
    connected = node.state == "connected"
    return state_cell(node.drain if node.drain is not None and connected else node.state)


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _bytes(number: int | None) -> str:
    return UNKNOWN if number is None else size_text(number)
