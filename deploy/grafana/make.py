"""The dashboards as code: fleet, job, node and server.

    python deploy/grafana/make.py             # writes deploy/grafana/dashboards/*.json
    python deploy/grafana/make.py --check     # fails if they are not current

It needs `grafana-foundation-sdk` (of the extra `dev`); Grafana needs only the JSON. A test
evaluates each query against a real Prometheus while the event that it shows takes place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
    VariableSort,
)

FOLDER = Path(__file__).with_name("dashboards")
TAG = "rdzv"
PAGE = "http://127.0.0.1:29480"
"""The address of rdzvd's page, unless it is set on the dashboard."""
SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")

LINES, STACKED, STAT, TIMELINE = "lines", "stacked", "stat", "timeline"
WIDE, HALF, THIRD, QUARTER = 24, 12, 8, 6
"""Of 24 columns."""


Levels = tuple[tuple[float, str], ...]
"""The value from which each colour is shown; below the first, green."""
Words = tuple[tuple[str, str, str], ...]
"""Values, the words that they are shown as, and their colours."""


@dataclass(frozen=True)
class Link:
    """A link, by its text."""

    text: str
    url: str


@dataclass(frozen=True)
class Query:
    """One query of a panel, and the names of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel: its content, and its purpose."""

    title: str
    text: str
    queries: tuple[Query, ...]
    kind: str = LINES
    unit: str = "short"
    span: int = THIRD
    levels: Levels = ()
    words: Words = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard. `variables` has the source of the values of each variable, by name."""

    uid: str
    title: str
    text: str
    variables: Mapping[str, str]
    rows: tuple[Row, ...]
    page: Link
    """A link to rdzvd's own page about the same."""
    marks: tuple[Query, ...]
    """Events marked on all panels."""


def panel(
    title: str,
    text: str,
    *queries: str | tuple[str, str],
    kind: str = LINES,
    unit: str = "short",
    span: int = THIRD,
    levels: Levels = (),
    words: Words = (),
    links: tuple[Link, ...] = (),
) -> Panel:
    """Write a panel whose queries may have a legend."""
    made = (Query(q) if isinstance(q, str) else Query(*q) for q in queries)
    return Panel(title, text, tuple(made), kind, unit, span, levels, words, links)


def mean(metric: str, by: str, where: str) -> str:
    """Query the mean of the observations of a summary or histogram in the time shown."""
    total, number = (
        f"sum by ({by}) (increase({metric}_{part}{{{where}}}[$__range])) > 0"
        for part in ("sum", "count")
    )
    return f"({total}) / ({number})"


def rate(metric: str, where: str, by: str = "") -> str:
    """Query a counter's rate, over all servers that have counted it."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def increase(metric: str, where: str, by: str = "") -> str:
    """Query by how much a counter grew between two points of the graph."""
    return f"sum by ({by}) (increase({metric}{{{where}}}[$__rate_interval]))"


def quantile(q: float, metric: str, where: str, by: str = "") -> str:
    """Return the query for a quantile of a histogram."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', where, labels)})"


# ------------------------------------------------------------------ the dashboards

SERVERS = {"job": "label_values(rdzv_leads, job)"}
FLEET_OF = 'job="$job"'
JOB_OF = 'job="$job", rdzv_id="$rdzv_id"'
NODE_OF = 'job="$job", node_id="$node_id"'
SERVER_OF = 'job="$job", instance="$instance", rdzv_kind!="agent"'

SHARE_LEVELS: Levels = ((0, "red"), (0.5, "orange"), (0.8, "green"))
STILL_LEVELS: Levels = ((60, "orange"), (600, "red"))
ANY_LEVELS: Levels = ((1, "red"),)
WORKS: Words = (("1", "works", "green"), ("0", "fails", "red"))
PAGE_OF_JOB = "${page}/#/job/%s"
TO_JOB = (
    Link(
        "Dashboard of ${__field.labels.rdzv_id}",
        "/d/rdzv-job?${datasource:queryparam}&${job:queryparam}"
        "&var-rdzv_id=${__field.labels.rdzv_id}&${__url_time_range}",
    ),
    Link("Page of ${__field.labels.rdzv_id}", PAGE_OF_JOB % "${__field.labels.rdzv_id}"),
)


def ended(where: str) -> str:
    """Query the ends of rounds within the last minute."""
    return f"sum by (cause) (increase(rdzv_job_rounds_ended_total{{{where}}}[1m])) > 0"


FLEET = Board(
    "rdzv-fleet",
    "rdzv: fleet",
    "All jobs and nodes of the servers that share a store.",
    SERVERS,
    (
        Row(
            "Now, and what has changed",
            (
                panel(
                    "Jobs",
                    "Jobs that have not ended. Those that are queued wait for free nodes.",
                    ('rdzv:jobs:sum{job="$job"}', "{{state}}"),
                    kind=STAT,
                ),
                panel(
                    "Nodes",
                    "Nodes of all jobs: with a stream, or waited for without one.",
                    (f"sum by (state) (rdzv_nodes{{{FLEET_OF}}})", "{{state}}"),
                    (f"sum by (by) (rdzv_nodes_barred{{{FLEET_OF}}})", "{{by}}"),
                    kind=STAT,
                ),
                panel(
                    "GPUs",
                    "GPUs of nodes that take submitted jobs; unusable: on a node that is away or "
                    "barred.",
                    (f"sum by (state) (rdzv_gpus{{{FLEET_OF}}})", "{{state}}"),
                    kind=STAT,
                ),
                panel(
                    "Alerts",
                    "What deploy/prometheus/alerts.yml says; docs/runbook.md has what to do.",
                    (
                        'count by (alertname, rdzv_id, node_id) (ALERTS{alertname=~"Rdzv.*", '
                        'alertstate="firing"})',
                        "{{alertname}} {{rdzv_id}}{{node_id}}",
                    ),
                    kind=TIMELINE,
                    span=HALF,
                    levels=ANY_LEVELS,
                ),
                panel(
                    "Jobs without a round",
                    "How long each has stood still, and why.",
                    (
                        f"max by (rdzv_id, reason) (rdzv_job_not_running_seconds{{{FLEET_OF}}})",
                        "{{rdzv_id}}: {{reason}}",
                    ),
                    unit="s",
                    span=HALF,
                    levels=STILL_LEVELS,
                    links=TO_JOB,
                ),
                panel(
                    "Membership changes",
                    "",
                    (increase("rdzv_membership_changes_total", FLEET_OF, "kind"), "{{kind}}"),
                    kind=STACKED,
                ),
                panel(
                    "Rounds that ended, by cause",
                    "Only worker failures spend restarts.",
                    (increase("rdzv_rounds_ended_total", FLEET_OF, "cause"), "{{cause}}"),
                    kind=STACKED,
                ),
                panel(
                    "Failures, restarts, losses",
                    "Workers that failed, restarts spent on that, and nodes that were given up.",
                    (increase("rdzv_worker_failures_total", FLEET_OF), "worker failures"),
                    (increase("rdzv_restarts_total", FLEET_OF), "restarts"),
                    (increase("rdzv_nodes_lost_total", FLEET_OF), "nodes lost"),
                ),
            ),
        ),
        Row(
            "Use",
            (
                panel(
                    "Jobs over time",
                    "",
                    ('rdzv:jobs:sum{job="$job"}', "{{state}}"),
                    kind=STACKED,
                ),
                panel(
                    "GPUs over time",
                    "What is free while jobs are queued does not fit them: `rdzvctl status` says.",
                    (f"sum by (state) (rdzv_gpus{{{FLEET_OF}}})", "{{state}}"),
                    kind=STACKED,
                ),
                panel(
                    "Places over time",
                    "Submitted jobs that the nodes take at once.",
                    (f"sum by (state) (rdzv_places{{{FLEET_OF}}})", "{{state}}"),
                    kind=STACKED,
                ),
                panel(
                    "Goodput, the ten lowest",
                    "The share of the last hour in which a job trained.",
                    ('bottomk(10, rdzv:job_goodput:ratio_rate1h{job="$job"})', "{{rdzv_id}}"),
                    unit="percentunit",
                    levels=SHARE_LEVELS,
                    links=TO_JOB,
                ),
                panel(
                    "Silence of workers, the ten longest",
                    "Time since any worker of the job reported a step; a hung one reports none.",
                    (
                        f"topk(10, max by (rdzv_id) (rdzv_job_progress_age_seconds{{{FLEET_OF}}}))",
                        "{{rdzv_id}}",
                    ),
                    unit="s",
                    links=TO_JOB,
                ),
                panel(
                    "Time of all jobs, by phase",
                    "What is not training is lost: `rdzvctl report` has the causes and nodes.",
                    (f"sum by (phase) (rdzv_job_phase_seconds{{{FLEET_OF}}}) > 0", "{{phase}}"),
                    kind=STACKED,
                    unit="s",
                ),
                panel(
                    "Runs that ended",
                    "",
                    (increase("rdzv_runs_ended_total", FLEET_OF, "result"), "{{result}}"),
                    kind=STACKED,
                ),
            ),
        ),
        Row(
            "How rounds begin and end",
            (
                panel(
                    "How workers came into rounds",
                    "Kept from the round before, hot standbys, forked warm, or started cold.",
                    (increase("rdzv_workers_started_total", FLEET_OF, "kind"), "{{kind}}"),
                    kind=STACKED,
                ),
                panel(
                    "Hangs, by cause",
                    "As the records of collectives show it.",
                    (increase("rdzv_hangs_total", FLEET_OF, "cause"), "{{cause}}"),
                    kind=STACKED,
                ),
                panel(
                    "Formation, 95 % are faster",
                    "From the first join, or a round's end, to the next complete round.",
                    ('rdzv:formation_seconds:p95_1h{job="$job"}', "{{kind}}"),
                    unit="s",
                ),
                panel(
                    "Recovery by phase, 95 % are faster",
                    "Until the last node has stopped, and from then to the next round.",
                    ('rdzv:recovery_seconds:p95_1h{job="$job"}', "{{phase}}"),
                    unit="s",
                ),
                panel(
                    "Nodes that leave, or get no job",
                    "Draining until nothing is left on them; and barred until that is lifted.",
                    (f"sum by (state) (rdzv_node_drains{{{FLEET_OF}}})", "{{state}}"),
                    (f"sum by (by) (rdzv_nodes_barred{{{FLEET_OF}}})", "{{by}}"),
                ),
                panel(
                    "Flapping nodes, and nodes that are missing",
                    "By job: lost again and again; and still to come before a round can complete.",
                    (
                        f"max by (rdzv_id) (rdzv_job_flapping_nodes{{{FLEET_OF}}}) > 0",
                        "{{rdzv_id}}: flap",
                    ),
                    (
                        f"max by (rdzv_id) (rdzv_job_missing_nodes{{{FLEET_OF}}}) > 0",
                        "{{rdzv_id}}: missing",
                    ),
                ),
                panel(
                    "Standbys",
                    "Nodes that wait, by the state of their standby workers.",
                    (f"sum by (state) (rdzv_job_standbys{{{FLEET_OF}}})", "{{state}}"),
                ),
            ),
        ),
        Row(
            "Jobs in torch's own store (rdzvd --c10d)",
            (
                panel(
                    "Jobs by state",
                    "They form by themselves, and are only watched.",
                    (f"sum by (state) (rdzv_c10d_jobs{{{FLEET_OF}}})", "{{state}}"),
                    kind=STACKED,
                    span=HALF,
                ),
                panel(
                    "Nodes by job",
                    "One that is lost stays: c10d does not re-form for it.",
                    (
                        f"sum by (rdzv_id, state) (rdzv_c10d_job_nodes{{{FLEET_OF}}}) > 0",
                        "{{rdzv_id}}: {{state}}",
                    ),
                    span=HALF,
                ),
            ),
        ),
    ),
    Link("rdzvd's page", "${page}/#/report"),
    (Query(f"sum by (job) (increase(rdzv_restarts_total{{{FLEET_OF}}}[1m])) > 0", "restart"),),
)

JOB = Board(
    "rdzv-job",
    "rdzv: job",
    "One job: its rounds, its nodes, what each change cost, and how far its workers are.",
    {**SERVERS, "rdzv_id": 'label_values(rdzv_job_state{job="$job"}, rdzv_id)'},
    (
        Row(
            "Membership and restarts",
            (
                panel(
                    "Restarts spent",
                    "At max_restarts the next worker failure ends the job.",
                    (f"max (rdzv_job_restarts_spent{{{JOB_OF}}})", "spent"),
                    (f"max (rdzv_job_max_restarts{{{JOB_OF}}})", "max"),
                    kind=STAT,
                    span=QUARTER,
                ),
                panel(
                    "Worker failures",
                    "In the time shown, also those whose round was charged to a lost node; and the "
                    "restarts that they cost.",
                    (
                        f"sum (increase(rdzv_job_worker_failures_total{{{JOB_OF}}}[$__range]))",
                        "failures",
                    ),
                    (
                        f"sum (increase(rdzv_job_restarts_total{{{JOB_OF}}}[$__range]))",
                        "restarts",
                    ),
                    kind=STAT,
                    span=QUARTER,
                    levels=((1, "orange"), (10, "red")),
                ),
                panel(
                    "Goodput",
                    "Training's share of the time since the server knows of the job; and how much "
                    "of it had a live round, training or not.",
                    (f"max (rdzv_job_goodput_ratio{{{JOB_OF}}})", "goodput"),
                    (
                        f"sum (increase(rdzv_job_running_seconds_total{{{JOB_OF}}}[$__range])) / "
                        f"sum (increase(rdzv_job_elapsed_seconds_total{{{JOB_OF}}}[$__range]))",
                        "live",
                    ),
                    kind=STAT,
                    unit="percentunit",
                    span=QUARTER,
                    levels=SHARE_LEVELS,
                ),
                panel(
                    "Age of the run",
                    "",
                    (f"max (rdzv_job_run_age_seconds{{{JOB_OF}}})", "age"),
                    kind=STAT,
                    unit="s",
                    span=QUARTER,
                ),
                panel(
                    "Nodes by state, against min and max",
                    "",
                    (f"max by (state) (rdzv_job_nodes{{{JOB_OF}}}) > 0", "{{state}}"),
                    (f"max (rdzv_job_min_nodes{{{JOB_OF}}})", "min"),
                    (f"max (rdzv_job_max_nodes{{{JOB_OF}}})", "max"),
                    span=HALF,
                ),
                panel(
                    "Rounds that ended, by cause",
                    "",
                    (increase("rdzv_job_rounds_ended_total", JOB_OF, "cause"), "{{cause}}"),
                    kind=STACKED,
                    span=HALF,
                ),
                panel(
                    "Membership changes",
                    "",
                    (
                        increase("rdzv_job_membership_changes_total", JOB_OF, "kind"),
                        "{{kind}}",
                    ),
                    kind=STACKED,
                ),
                panel(
                    "Why it stands still",
                    "Absent while a round is live.",
                    (
                        f"max by (reason) (rdzv_job_not_running_seconds{{{JOB_OF}}})",
                        "{{reason}}",
                    ),
                    unit="s",
                    levels=STILL_LEVELS,
                ),
                panel(
                    "Missing and flapping nodes",
                    "",
                    (f"max (rdzv_job_missing_nodes{{{JOB_OF}}})", "missing"),
                    (f"max (rdzv_job_flapping_nodes{{{JOB_OF}}})", "flapping"),
                ),
            ),
        ),
        Row(
            "Rounds",
            (
                panel(
                    "State",
                    "",
                    (f"max by (state) (rdzv_job_state{{{JOB_OF}}})", "{{state}}"),
                    kind=TIMELINE,
                    span=WIDE,
                    words=(("1", "is", "blue"), ("0", "is not", "transparent")),
                ),
                panel(
                    "Rounds",
                    "The number of the last complete round: each step is a new group.",
                    (f"max by (rdzv_id) (rdzv_job_round{{{JOB_OF}}})", "round"),
                    kind=TIMELINE,
                    span=WIDE,
                ),
                panel(
                    "Rounds completed",
                    "",
                    (increase("rdzv_job_rounds_completed_total", JOB_OF), "complete"),
                    span=HALF,
                ),
                panel(
                    "Workers",
                    "Of the live round; 0 while none is live.",
                    (f"max (rdzv_job_world_size{{{JOB_OF}}})", "world size"),
                    span=HALF,
                ),
            ),
        ),
        Row(
            "Where the time goes",
            (
                panel(
                    "Time by phase",
                    "What the job has spent its time on; `rdzvctl report` has causes and nodes. "
                    "Without progress files, starting and redone steps count as training.",
                    (f"sum by (phase) (rdzv_job_phase_seconds{{{JOB_OF}}}) > 0", "{{phase}}"),
                    kind=STACKED,
                    unit="s",
                ),
                panel(
                    "Time of its nodes",
                    "What it costs beside what it gives: the time of all nodes that the job held.",
                    (f"sum by (kind) (rdzv_job_node_seconds{{{JOB_OF}}})", "{{kind}}"),
                    kind=STACKED,
                    unit="s",
                ),
                panel(
                    "Time that was not training",
                    "By phase, since the server knows of the job.",
                    (
                        f'sum by (phase) (rdzv_job_phase_seconds{{{JOB_OF}, phase!="training"}})'
                        " > 0",
                        "{{phase}}",
                    ),
                    kind=STAT,
                    unit="s",
                ),
            ),
        ),
        Row(
            "What changes cost",
            (
                panel(
                    "Rounds that ended, in the time shown",
                    "By what was charged; only worker failures spend restarts.",
                    (
                        "sum by (cause) "
                        f"(increase(rdzv_job_rounds_ended_total{{{JOB_OF}}}[$__range])) > 0",
                        "{{cause}}",
                    ),
                    kind=STAT,
                ),
                panel(
                    "Recovery by phase",
                    "The mean of the time shown: until the last node had stopped, and from then "
                    "to the next round.",
                    (mean("rdzv_job_recovery_seconds", "phase", JOB_OF), "{{phase}}"),
                    kind=STAT,
                    unit="s",
                ),
                panel(
                    "Formation",
                    "The mean of the time shown: from the first join, or a round's end, to the "
                    "next round.",
                    (mean("rdzv_job_formation_seconds", "rdzv_id", JOB_OF), "formation"),
                    kind=STAT,
                    unit="s",
                ),
                panel(
                    "Budgets",
                    "What the run has spent beside restarts, and how much it may, if it was "
                    "launched with a bound.",
                    (f"max (rdzv_job_preemptions_spent{{{JOB_OF}}})", "preemptions"),
                    (f"max (rdzv_job_max_preemptions{{{JOB_OF}}})", "max preemptions"),
                    (f"max (rdzv_job_store_failures_spent{{{JOB_OF}}})", "store failures"),
                    (f"max (rdzv_job_max_store_failures{{{JOB_OF}}})", "max store failures"),
                    (
                        f"max (rdzv_job_restarts_without_progress{{{JOB_OF}}})",
                        "restarts without progress",
                    ),
                    (f"max (rdzv_job_no_progress_restarts{{{JOB_OF}}})", "max without progress"),
                    kind=STAT,
                    span=WIDE,
                ),
                panel(
                    "Goodput of the last hour",
                    "",
                    (
                        f"rdzv:job_goodput:ratio_rate1h{{{JOB_OF}}}",
                        "goodput",
                    ),
                    unit="percentunit",
                    span=HALF,
                ),
                panel(
                    "Time lost in rounds' ends",
                    "Seconds of each second, by phase.",
                    (rate("rdzv_job_recovery_seconds_sum", JOB_OF, "phase"), "{{phase}}"),
                    kind=STACKED,
                    unit="percentunit",
                    span=HALF,
                ),
            ),
        ),
        Row(
            "Workers",
            (
                panel(
                    "Step",
                    "As workers report it (RDZV_PROGRESS_FILE).",
                    *(
                        (f"max (rdzv_job_{which}_step{{{JOB_OF}}})", which)
                        for which in ("min", "median", "max")
                    ),
                ),
                panel(
                    "Steps per second",
                    "A slow worker holds up all others.",
                    (f"min (rdzv_job_steps_per_second{{{JOB_OF}}})", "slowest"),
                    (f"max (rdzv_job_median_steps_per_second{{{JOB_OF}}})", "median"),
                    (f"max (rdzv_job_max_steps_per_second{{{JOB_OF}}})", "fastest"),
                ),
                panel(
                    "Time since a step",
                    "",
                    (f"min (rdzv_job_progress_age_seconds{{{JOB_OF}}})", "of any worker"),
                    (
                        f"max (rdzv_job_max_progress_age_seconds{{{JOB_OF}}})",
                        "of the longest silent",
                    ),
                    unit="s",
                ),
                panel(
                    "Workers that report steps",
                    "",
                    (f"max (rdzv_job_progress_workers{{{JOB_OF}}})", "workers"),
                    (f"max (rdzv_job_straggling_ranks{{{JOB_OF}}})", "straggling"),
                ),
                panel(
                    "Waiting for a straggler",
                    "The least share of the time in which the others wait for the latest worker.",
                    (f"max (rdzv_job_straggler_wait_ratio{{{JOB_OF}}})", "of the time"),
                    unit="percentunit",
                ),
                panel(
                    "Snapshots in memory",
                    "The newest step that is whole, the one that would be without any one node, "
                    "and the steps that a failure of all workers would cost.",
                    (f"max (rdzv_job_snapshot_step{{{JOB_OF}}})", "whole step"),
                    (
                        f"max (rdzv_job_snapshot_step_without_a_node{{{JOB_OF}}})",
                        "whole without a node",
                    ),
                    (f"max (rdzv_job_snapshot_lost_steps{{{JOB_OF}}})", "steps that would be lost"),
                    (f"max (rdzv_job_snapshots{{{JOB_OF}}})", "snapshots held"),
                ),
                panel(
                    "Age of the whole snapshot",
                    "",
                    (f"max (rdzv_job_snapshot_age_seconds{{{JOB_OF}}})", "age"),
                    unit="s",
                ),
                panel(
                    "Size of snapshots",
                    "Memory of all nodes that holds them.",
                    (f"max (rdzv_job_snapshot_bytes{{{JOB_OF}}})", "bytes"),
                    unit="bytes",
                ),
            ),
        ),
    ),
    Link("rdzvd's page of this job", PAGE_OF_JOB % "${rdzv_id}"),
    (Query(ended(JOB_OF), "round ended: {{cause}}"),),
)

NODE = Board(
    "rdzv-node",
    "rdzv: node",
    "One rdzv-agent: its workers, its GPUs, its stream.",
    {**SERVERS, "node_id": 'label_values(rdzv_agent_build_info{job="$job"}, node_id)'},
    (
        Row(
            "Now",
            (
                panel(
                    "Connected",
                    "Whether its agent answers the server.",
                    (f"max (up{{{NODE_OF}}})", "connected"),
                    kind=STAT,
                    span=QUARTER,
                    words=(("1", "connected", "green"), ("0", "cut off", "red")),
                ),
                panel(
                    "Jobs",
                    "Submitted jobs that it holds, and how many it takes.",
                    (f"max by (state) (rdzv_agent_jobs{{{NODE_OF}}})", "{{state}}"),
                    (f"max (rdzv_agent_capacity{{{NODE_OF}}})", "capacity"),
                    kind=STAT,
                    span=QUARTER,
                ),
                panel(
                    "GPUs",
                    "Free, of a job that runs, or of one that ends.",
                    (f"max by (state) (rdzv_agent_gpus{{{NODE_OF}}})", "{{state}}"),
                    kind=STAT,
                    span=QUARTER,
                ),
                panel(
                    "Version",
                    "",
                    (
                        f"max by (version) (rdzv_agent_build_info{{{NODE_OF}}})",
                        "{{version}}",
                    ),
                    kind=STAT,
                    span=QUARTER,
                ),
            ),
        ),
        Row(
            "Workers",
            (
                panel(
                    "Workers by state",
                    "",
                    (f"max by (state) (rdzv_agent_workers{{{NODE_OF}}})", "{{state}}"),
                    kind=STACKED,
                ),
                panel(
                    "Exits by themselves",
                    "By exit code or signal.",
                    (
                        increase(
                            "rdzv_agent_worker_exits_total", f'{NODE_OF}, during="run"', "how"
                        ),
                        "{{how}}",
                    ),
                    kind=STACKED,
                ),
                panel(
                    "Exits when told to stop",
                    "SIGKILL here: the worker did not end in time.",
                    (
                        increase(
                            "rdzv_agent_worker_exits_total", f'{NODE_OF}, during="stop"', "how"
                        ),
                        "{{how}}",
                    ),
                    kind=STACKED,
                ),
                panel(
                    "Workers that begin a round",
                    "Kept from the round before, started warm, or started cold.",
                    (increase("rdzv_agent_worker_starts_total", NODE_OF, "how"), "{{how}}"),
                    kind=STACKED,
                ),
                panel(
                    "From round to round, 95 % are faster",
                    "Kept workers are parked and resumed; the others are started.",
                    (quantile(0.95, "rdzv_agent_worker_start_seconds", NODE_OF), "start"),
                    (quantile(0.95, "rdzv_agent_park_seconds", NODE_OF), "park"),
                    (quantile(0.95, "rdzv_agent_resume_seconds", NODE_OF), "resume"),
                    unit="s",
                ),
                panel(
                    "Rounds and restarts",
                    "",
                    (increase("rdzv_agent_rounds_started_total", NODE_OF), "rounds"),
                    (increase("rdzv_agent_restarts_total", NODE_OF), "restarts"),
                ),
                panel(
                    "What should not be",
                    "",
                    (f"max (rdzv_agent_stuck_processes{{{NODE_OF}}})", "survive SIGKILL"),
                    (
                        increase("rdzv_agent_worker_start_failures_total", NODE_OF),
                        "not started",
                    ),
                    (
                        increase("rdzv_agent_workers_started_cold_total", NODE_OF),
                        "cold instead of warm",
                    ),
                    (increase("rdzv_agent_rounds_fenced_total", NODE_OF), "fenced"),
                    (
                        increase("rdzv_agent_runner_exits_total", f'{NODE_OF}, how="unexpectedly"'),
                        "runners died",
                    ),
                    levels=ANY_LEVELS,
                ),
            ),
        ),
        Row(
            "Stream and agent",
            (
                panel(
                    "Streams",
                    "A stream that is lost and opened again is harmless; many are a network's.",
                    (increase("rdzv_agent_streams_opened_total", NODE_OF), "opened"),
                    (increase("rdzv_agent_streams_lost_total", NODE_OF), "lost"),
                    (increase("rdzv_agent_reconnects_total", NODE_OF), "opened after a loss"),
                    (increase("rdzv_agent_connect_failures_total", NODE_OF), "attempts failed"),
                ),
                panel(
                    "Runners and store hosts",
                    "",
                    (f"max (rdzv_agent_runners{{{NODE_OF}}})", "runners"),
                    (
                        increase("rdzv_agent_store_host_exits_total", NODE_OF),
                        "store hosts that exited",
                    ),
                ),
                panel(
                    "Lease",
                    "How long the server tolerates silence of this node.",
                    (f"max (rdzv_agent_lease_seconds{{{NODE_OF}}})", "lease"),
                    unit="s",
                ),
                panel(
                    "CPU of the agent",
                    "",
                    (rate("process_cpu_seconds_total", NODE_OF), "CPUs"),
                ),
                panel(
                    "Memory of the agent",
                    "",
                    (f"max (process_resident_memory_bytes{{{NODE_OF}}})", "resident"),
                    unit="bytes",
                ),
                panel(
                    "Metrics that could be computed",
                    "0: see the agent's log.",
                    (
                        f"min by (collector) (rdzv_agent_collector_success{{{NODE_OF}}})",
                        "{{collector}}",
                    ),
                    kind=STAT,
                    words=WORKS,
                ),
            ),
        ),
    ),
    Link("rdzvd's page of this node", "${page}/#/node/${node_id}"),
    (
        Query(
            f"sum by (node_id) (increase(rdzv_agent_restarts_total{{{NODE_OF}}}[1m])) > 0",
            "restart",
        ),
    ),
)

SERVER = Board(
    "rdzv-server",
    "rdzv: server",
    "One rdzvd: does it lead, is its store well, is it short of time?",
    {**SERVERS, "instance": 'label_values(rdzv_leads{job="$job"}, instance)'},
    (
        Row(
            "Leadership",
            (
                panel(
                    "Who leads",
                    "All servers that share the store.",
                    (f"max by (instance) (rdzv_leads{{{FLEET_OF}}})", "{{instance}}"),
                    kind=TIMELINE,
                    span=HALF,
                    words=(("1", "leads", "green"), ("0", "stands by", "blue")),
                ),
                panel(
                    "Leadership",
                    "Grows with each take-over.",
                    (f"max (rdzv_leadership{{{FLEET_OF}}})", "leadership"),
                    kind=STAT,
                    span=QUARTER,
                ),
                panel(
                    "Version and store",
                    "",
                    (
                        f"max by (version, store) (rdzv_build_info{{{SERVER_OF}}})",
                        "{{version}} on {{store}}",
                    ),
                    kind=STAT,
                    span=QUARTER,
                ),
            ),
        ),
        Row(
            "Store",
            (
                panel(
                    "Commits",
                    "",
                    (rate("rdzv_commit_seconds_count", SERVER_OF), "per second"),
                    unit="ops",
                ),
                panel(
                    "Time of a commit",
                    "Every round and every join waits for one.",
                    *(
                        (quantile(q, "rdzv_commit_seconds", SERVER_OF), f"p{q * 100:g}")
                        for q in (0.5, 0.99)
                    ),
                    ('rdzv:commit_seconds:p99_5m{job="$job"}', "p99 of all, 5 min"),
                    unit="s",
                ),
                panel(
                    "Store away, errors",
                    "While it is away nothing new is decided, and workers continue.",
                    (f"max (rdzv_store_away_seconds{{{SERVER_OF}}})", "away, s"),
                    (
                        increase("rdzv_store_errors_total", SERVER_OF, "operation"),
                        "errors: {{operation}}",
                    ),
                ),
                panel(
                    "Calls refused",
                    "Calls without a valid identity, or without the role; rdzvd's log names the "
                    "callers.",
                    (increase("rdzv_refused_calls_total", SERVER_OF, "reason"), "{{reason}}"),
                ),
            ),
        ),
        Row(
            "Streams",
            (
                panel(
                    "Streams and watchers",
                    "",
                    (f"max (rdzv_streams{{{SERVER_OF}}})", "streams"),
                    (f"max (rdzv_watchers{{{SERVER_OF}}})", "watchers"),
                ),
                panel(
                    "Streams opened, nodes lost",
                    "",
                    (increase("rdzv_streams_opened_total", SERVER_OF), "opened"),
                    (increase("rdzv_nodes_lost_total", SERVER_OF), "lost"),
                ),
                panel(
                    "Messages",
                    "",
                    (rate("rdzv_messages_received_total", SERVER_OF), "received"),
                    (rate("rdzv_messages_sent_total", SERVER_OF), "sent"),
                    unit="cps",
                ),
                panel(
                    "Lease, and the longest silence",
                    "Silence beyond the lease costs a node its seat.",
                    (f"max (rdzv_lease_seconds{{{SERVER_OF}}})", "lease"),
                    (f"max (rdzv_node_silence_seconds{{{SERVER_OF}}})", "silence"),
                    unit="s",
                ),
                panel(
                    "Lag of the event loop",
                    "Half a second is a pause: leases are renewed after it.",
                    (quantile(0.5, "rdzv_loop_lag_seconds", SERVER_OF), "p50"),
                    (quantile(0.99, "rdzv_loop_lag_seconds", SERVER_OF), "p99"),
                    (
                        f"rdzv:loop_lag_seconds:p99_5m{{{SERVER_OF}}}",
                        "p99, 5 min",
                    ),
                    unit="s",
                ),
                panel(
                    "Metrics that could be computed",
                    "0: see the server's log.",
                    (
                        f"min by (collector) (rdzv_collector_success{{{SERVER_OF}}})",
                        "{{collector}}",
                    ),
                    kind=STAT,
                    words=WORKS,
                ),
            ),
        ),
        Row(
            "Process",
            (
                panel("CPU", "", (rate("process_cpu_seconds_total", SERVER_OF), "CPUs")),
                panel(
                    "Memory",
                    "",
                    (f"max (process_resident_memory_bytes{{{SERVER_OF}}})", "resident"),
                    unit="bytes",
                ),
                panel(
                    "Open files",
                    "Each stream is one.",
                    (f"max (process_open_fds{{{SERVER_OF}}})", "open"),
                    (f"max (process_max_fds{{{SERVER_OF}}})", "most"),
                ),
            ),
        ),
    ),
    Link("rdzvd's page", "${page}/"),
    (),
)

BOARDS = (FLEET, JOB, NODE, SERVER)


# ------------------------------------------------------------------ Grafana's form


def build(board: Board) -> str:
    """Return a dashboard as Grafana reads it."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags([TAG])
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            dashboard.DashboardLink("rdzv")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .link(
            dashboard.DashboardLink(board.page.text)
            .type(DashboardLinkType.LINK)
            .url(board.page.url)
            .target_blank(True)
        )
        .with_variable(dashboard.TextBoxVariable("page").label("rdzvd's page").default_value(PAGE))
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    for name, values in board.variables.items():
        made.with_variable(
            dashboard.QueryVariable(name)
            .label(name)
            .datasource(SOURCE)
            .query(values)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
        )
    for row in board.rows:
        made.with_row(dashboard.Row(row.title))
        for one in row.panels:
            made.with_panel(_panel(one))
    text = JSONEncoder(sort_keys=True, indent=2).encode(made.build())
    document = _numbered(json.loads(text))
    document["annotations"] = {"list": [_mark(mark) for mark in board.marks]}
    return json.dumps(document, sort_keys=True, indent=2) + "\n"


def _mark(mark: Query) -> dict[str, object]:
    """Mark when a query has an answer; the SDK does not know Prometheus' own keys."""
    return {
        "datasource": {"type": SOURCE.type_val, "uid": SOURCE.uid},
        "enable": True,
        "expr": mark.expr,
        "iconColor": "red",
        "name": mark.legend.partition(":")[0],
        "step": "60s",
        "titleFormat": mark.legend,
    }


def _numbered(document: dict[str, object]) -> dict[str, object]:
    """Give every panel the number that links use."""
    panels = document["panels"]
    assert isinstance(panels, list)
    for number, one in enumerate(panels, 1):
        one["id"] = number
    return document


def _panel(one: Panel) -> timeseries.Panel | stat.Panel | statetimeline.Panel:
    made = _KINDS[one.kind]()
    made.title(one.title).description(one.text).datasource(SOURCE).unit(one.unit)
    made.span(one.span).height(4 if one.kind == STAT else 8)
    if one.kind == STAT or one.levels:
        made.thresholds(_levels(one.levels))
    if one.levels and isinstance(made, timeseries.Panel):
        style = common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        made.thresholds_style(style)
    if one.words:
        shown = {v: ValueMappingResult(text, colour) for v, text, colour in one.words}
        made.mappings([ValueMap(shown)])
    if one.links:
        made.data_links([dashboard.DashboardLink(to.text).url(to.url) for to in one.links])
    instant = one.kind == STAT
    for number, query in enumerate(one.queries):
        target = Dataquery().expr(query.expr).legend_format(query.legend).datasource(SOURCE)
        target.ref_id(chr(ord("A") + number))
        made.with_target(target.instant() if instant else target.range())
    return made


def _levels(levels: Levels) -> dashboard.ThresholdsConfig:
    """Return thresholds; without any, a number has one colour: Grafana's default is red from 80."""
    steps = [Threshold(value=None, color="green" if levels else "blue")]
    steps += [Threshold(value=value, color=colour) for value, colour in levels]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _lines() -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    return timeseries.Panel().min(0).line_width(1).legend(legend)


def _stacked() -> timeseries.Panel:
    stacking = common.StackingConfig().mode(StackingMode.NORMAL)
    return _lines().fill_opacity(30).stacking(stacking)


def _stat() -> stat.Panel:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _timeline() -> statetimeline.Panel:
    return statetimeline.Panel().merge_values(True)


_KINDS = {LINES: _lines, STACKED: _stacked, STAT: _stat, TIMELINE: _timeline}


def main(arguments: Iterable[str]) -> int:
    """Write the dashboards; with --check only report outdated ones."""
    check = "--check" in arguments
    stale = []
    for board in BOARDS:
        path = FOLDER / f"{board.uid}.json"
        text = build(board)
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(text)
    for name in stale:
        sys.stdout.write(f"{name} {'is not current' if check else 'is written'}\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
