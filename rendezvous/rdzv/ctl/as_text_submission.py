"""Formats a job that was or would be submitted: what it runs, and where it is placed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rdzv.core.model import JobSpec, Settings
from rdzv.core.words import counted, duration, listed
from rdzv.ctl.layout import Cell, Page
from rdzv.view.answers import JobStatus, Submission


def submitted(job: JobStatus, server: str | None, page: Page, *, followed: bool = False) -> str:
    """Describe a submitted job: what it waits for and, unless `followed`, how to follow it."""
    lines = [page.line(Cell(job.rdzv_id, "bold"), Cell("is submitted"))]
    lines += page.sentence(job.reason.line or "(the server gives no reason)")
    lines += [line for item in job.reason.items for line in page.sentence(str(item), indent=2)]
    if not followed:
        program = f"rdzvctl --server={server}" if server else "rdzvctl"
        lines += page.fact("follow it", Cell(f"{program} logs -f {job.rdzv_id}"))
        lines += page.fact("see it", Cell(f"{program} status -w {job.rdzv_id}"))
    return "\n".join(lines)


def to_submit(rdzv_id: str, settings: Settings, spec: JobSpec, page: Page) -> str:
    """Format the job that would be submitted."""
    each = str(spec.local_world_size) if spec.local_world_size else "as many as each node counts"
    lines = [page.line(Cell(rdzv_id, "bold"), Cell("would be submitted; nothing was sent"))]
    found = [
        ("nodes", f"{settings.min_nodes}:{settings.max_nodes}"),
        ("workers", f"{each} on each node"),
        ("restarts", str(settings.max_restarts)),
        *_wanted(
            spec.args,
            [name for name, _ in spec.env],
            spec.chdir,
            dict(spec.labels),
            spec.priority,
            spec.gpus_per_node,
            spec.account,
        ),
    ]
    return "\n".join(
        [*lines, *(line for label, text in found for line in page.fact(label, Cell(text)))]
    )


def submission(job: JobStatus, made: Submission, page: Page) -> list[str]:
    """Format how a job was submitted, and its placement so far."""
    by = made.submitted_by or "-"
    if made.submitter:
        by += f" [{made.submitter}]"
    found = [
        ("submitted", f"by {by}, {duration(made.age_ms)} ago"),
        *_wanted(
            made.args,
            made.env_names,
            made.chdir or "",
            made.labels,
            made.priority,
            made.gpus_per_node,
            made.account or "",
        ),
    ]
    if made.jobs_before:
        found.append(("waits behind", counted(made.jobs_before, "job")))
    if coming := awaited(job):
        found.append(("placed", f"{listed(coming)}; not joined yet"))
    lines = [line for label, text in found for line in page.fact(label, Cell(text))]
    for node in made.declined:
        lines += page.fact("declined", Cell(f"{node.node_id}: {node.reason}", "yellow"))
    return lines


def awaited(job: JobStatus) -> list[str]:
    """List the nodes on which a submitted job is placed but which have not joined yet.

    A job that has ended awaits no nodes; its nodes may have joined and left.
    """
    if job.state in ("succeeded", "failed", "stopped"):
        return []
    # The job may have been placed again on a node that had left.
    here = {node.node_id for node in job.nodes if node.state not in ("left", "lost")}
    placed = job.submission.placed if job.submission else ()
    return [node_id for node_id in placed if node_id not in here]


def _wanted(
    args: Sequence[str],
    env_names: Sequence[str],
    chdir: str,
    labels: Mapping[str, str],
    priority: int,
    gpus_per_node: int | None,
    account: str,
) -> list[tuple[str, str]]:
    """Describe what a submitted job runs and needs, omitting most defaults."""
    found = [("runs", shlex.join(args)), ("in", chdir or "the folder that the node chooses")]
    if env_names:
        found.append(("environment", f"{', '.join(env_names)} (values are not shown)"))
    if labels:
        found.append(("labels", ", ".join(f"{name}={value}" for name, value in labels.items())))
    if gpus_per_node is not None:
        found.append(("GPUs", f"{gpus_per_node} on each node"))
    if priority:
        found.append(("priority", str(priority)))
    if account:
        found.append(("account", account))
    return found
