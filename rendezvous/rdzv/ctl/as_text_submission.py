"""Formats a job that was or would be submitted: what it runs, and where it is placed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rdzv.core.model import JobSpec, Settings
from rdzv.core.words import counted, duration, listed
from rdzv.ctl.layout import Cell, Page, bold
from rdzv.view.answers import ENDED, JobStatus, Submission


def submitted(job: JobStatus, server: str | None, page: Page, *, followed: bool = False) -> str:
    """Describe a submitted job: what it waits for and, unless `followed`, how to follow it."""
    lines = [page.line(bold(job.rdzv_id), "is submitted")]
    lines += page.sentence(job.reason.line or "(the server gives no reason)")
    lines += [line for item in job.reason.items for line in page.sentence(str(item), indent=2)]
    if not followed:
        program = f"rdzvctl --server={server}" if server else "rdzvctl"
        lines += page.fact("follow it", f"{program} logs -f {job.rdzv_id}")
        lines += page.fact("see it", f"{program} status -w {job.rdzv_id}")
    return "\n".join(lines)


def to_submit(rdzv_id: str, settings: Settings, spec: JobSpec, page: Page) -> str:
    """Format the job that would be submitted."""
    each = str(spec.local_world_size) if spec.local_world_size else "as many as each node counts"
    first = page.line(bold(rdzv_id), "would be submitted; nothing was sent")
    facts = {
        "nodes": f"{settings.min_nodes}:{settings.max_nodes}",
        "workers": f"{each} on each node",
        "restarts": str(settings.max_restarts),
        **_wanted(spec, spec.chdir, dict(spec.labels), [name for name, _ in spec.env]),
    }
    return "\n".join([first, *page.facts(facts)])


def submission(job: JobStatus, made: Submission, page: Page) -> list[str]:
    """Format how a job was submitted, and its placement so far."""
    by = made.submitted_by or "-"
    if made.submitter:
        by += f" [{made.submitter}]"
    lines = page.facts(
        {
            "submitted": f"by {by}, {duration(made.age_ms)} ago",
            **_wanted(made, made.chdir, made.labels, made.env_names),
            "waits behind": counted(made.jobs_before, "job") if made.jobs_before else "",
            "placed": f"{listed(coming)}; not joined yet" if (coming := awaited(job)) else "",
        }
    )
    for node in made.declined:
        lines += page.fact("declined", Cell(f"{node.node_id}: {node.reason}", "yellow"))
    return lines


def awaited(job: JobStatus) -> list[str]:
    """List the nodes on which a submitted job is placed but which have not joined yet.

    A job that has ended awaits no nodes; its nodes may have joined and left.
    """
    if job.state in ENDED:
        return []
    # The job may have been placed again on a node that had left.
    here = {node.node_id for node in job.nodes if node.state not in ("left", "lost")}
    placed = job.submission.placed if job.submission else ()
    return [node_id for node_id in placed if node_id not in here]


def _wanted(
    job: JobSpec | Submission,
    chdir: str | None,
    labels: Mapping[str, str],
    env_names: Sequence[str],
) -> dict[str, str]:
    """Describe what a submitted job runs and needs, with empty values for most defaults."""
    gpus = job.gpus_per_node
    return {
        "runs": shlex.join(job.args),
        "in": chdir or "the folder that the node chooses",
        "environment": f"{', '.join(env_names)} (values are not shown)" if env_names else "",
        "labels": ", ".join(f"{name}={value}" for name, value in labels.items()),
        "GPUs": "" if gpus is None else f"{gpus} on each node",
        "priority": str(job.priority or ""),
        "account": job.account or "",
    }
