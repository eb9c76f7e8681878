"""`rdzvctl stacks`: shows where in their code a round's workers are, grouped by place."""

from __future__ import annotations

from collections.abc import Sequence

from rdzv.core.evidence.collectives import MIN_WAIT_MS, CollectiveRecord, GroupRecord
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.words import counted, duration, ranks_text
from rdzv.ctl.layout import Page, bold, dim
from rdzv.view.answers import StackReport

_MOST_FRAMES = 12
_MOST_GROUPS = 16
_MOST_SILENT = 16


def text(report: StackReport, page: Page, *, raw: bool) -> str:
    """Format one line per group, then one stack from each; with `raw`, all stacks in full."""
    taken = f"taken {duration(report.age_ms)} ago, at {page.ago(report.age_ms)}"
    lines = [page.line(bold(report.rdzv_id), f"round {report.round}", taken)]
    lines += page.sentence(report.reason)
    lines.append("")
    if report.cause is not None:
        lines += page.sentence(report.cause.sentence)
        for detail in report.cause.details:
            lines += page.block(detail, indent=2)
        lines.append("")
    elif report.stacks and all(stack.collectives for stack in report.stacks) and not report.silent:
        lines += [f"no rank has waited in a collective for longer than {MIN_WAIT_MS // 1000} s", ""]
    groups = report.groups if raw else report.groups[:_MOST_GROUPS]
    for group in groups:
        lines += page.sentence(f"RANK {ranks_text(group.ranks)} {group.where}")
    if more := report.groups[len(groups) :]:
        workers = sum(len(group.ranks) for group in more)
        note = f"... and {counted(workers, 'worker')} at {len(more)} other places; --raw shows them"
        lines.append(page.line(dim(note)))
    for node in report.silent if raw else report.silent[:_MOST_SILENT]:
        first, last = node.rank_first, node.rank_first + node.local_world_size - 1
        ranks = f"{first}-{last}" if last > first else str(first)
        lines += page.sentence(f"RANK {ranks} on {node.node_id}: {node.reason}")
    if not raw and len(report.silent) > _MOST_SILENT:
        silent = counted(len(report.silent) - _MOST_SILENT, "more node")
        lines.append(page.line(dim(f"... and {silent} with no report")))
    if not report.groups and not report.silent:
        lines.append("there was no worker")
    for stack in report.stacks if raw else _one_of_each(report, groups_shown=len(groups)):
        lines += ["", *_stack(stack, page, raw)]
    if raw and report.left_out:
        note = f"the stacks of {counted(report.left_out, 'more worker')} were too many to keep"
        lines += ["", page.line(dim(note))]
    return "\n".join(lines)


def _one_of_each(report: StackReport, groups_shown: int) -> Sequence[WorkerStack]:
    by_rank = {stack.rank: stack for stack in report.stacks}
    found = []
    for group in report.groups[:groups_shown]:
        rank = next((rank for rank in group.ranks if rank in by_rank), None)
        if rank is not None:
            found.append(by_rank[rank])
    return found


def _stack(stack: WorkerStack, page: Page, raw: bool) -> list[str]:
    state = f", state {stack.state}" if stack.state else ""
    who = f"RANK {stack.rank} on {stack.node_id}, LOCAL_RANK {stack.local_rank}, pid {stack.pid}"
    lines = [page.line(bold(who + state))]
    for thread in stack.threads if raw else stack.threads[:1]:
        if raw:
            lines.append(page.line(dim(f"  thread {thread.name or '(without a name)'}")))
        frames = thread.frames if raw else thread.frames[:_MOST_FRAMES]
        for frame in frames:
            at = f"{frame.file}:{frame.line}" if frame.line else frame.file
            lines += page.block(f"{frame.name} ({at})", indent=4)
        if left_out := len(thread.frames) - len(frames):
            lines += page.block(f"... {left_out} more frames; --raw shows them", indent=4)
        if not thread.frames:
            lines += page.block("(no Python frames)", indent=4)
    for place in stack.kernel:
        lines += page.block(f"in the kernel: {place}", indent=4)
    if stack.note:
        lines += page.block(stack.note, indent=4)
    for record in stack.collectives:
        lines += page.block(_record(record), indent=4)
        for one in record.latest if raw else ():
            lines += page.block(f"  {_collective(one)}", indent=4)
    if stack.no_record:
        lines += page.block(f"no record of its collectives: {stack.no_record}", indent=4)
    return lines


def _record(record: GroupRecord) -> str:
    name = " ".join(filter(None, (record.group, record.description)))
    if not record.latest:
        return f"group {name}: it has entered no collective"
    return f"group {name}: last {_collective(record.latest[-1])}"


def _collective(one: CollectiveRecord) -> str:
    state = "done" if one.done else f"waiting for {duration(one.age_ms)}"
    return " ".join(filter(None, (one.operation, f"#{one.sequence}", one.sizes, f"({state})")))
