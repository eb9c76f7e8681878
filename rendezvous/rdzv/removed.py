"""Settings and options that were removed, and what to do in place of each."""

from __future__ import annotations

CONSTANTS = {
    "forming": "claims_quiet flap_hold flap_window gather gather_quiet root_cause_window "
    "stop_margin store_backoff store_backoff_longest",
    "lease": "heartbeats reconnect_grace",
    "limits": "away commands_per_second http_connections http_connections_per_peer http_requests "
    "inbox job_timeout jobs_per_node local_world_size log_buffer log_readers log_window "
    "message nodes_per_job outbox scrapes watchers",
    "oidc": "keys_refresh",
    "quarantine": "window",
    "retention": "events look_every",
    "timings": "deaf_after first_request handshake hello_timeout leaderless_hold log_answer "
    "metrics_of_ended stop_grace store_retry",
}
"""The settings that became constants, as nobody had set them, by their tables."""

TABLES = frozenset(CONSTANTS)

REMOVED = {
    "notify.style": "each event is posted as JSON, with its sentence in `text`; leave it out, and "
    "for a chat use Alertmanager or the receiver in docs/operations.md",
    **{
        f"{table}.{name}": "it is a constant, which nobody had set; leave it out"
        for table, names in CONSTANTS.items()
        for name in names.split()
    },
    "relay": "nodes connect to the servers themselves, each of which holds 10,000; leave it out, "
    "and give agents the addresses of the servers",
    "otlp": "leave it out; `rdzvctl trace JOB -o FILE` writes a job's rounds for ui.perfetto.dev",
    "upstream": "it was for `relay`, which was removed as well; leave it out",
}
"""What to do in place of each removed setting, by its key or that of its table."""


def instead_of(key: str) -> str:
    """Return what to do in place of a removed setting, or "" if `key` does not name one."""
    return REMOVED.get(key) or REMOVED.get(key.partition(".")[0], "")


def instead_of_option(option: str) -> str:
    """Return what to do in place of a removed option, or "" if `option` is not one."""
    key = option.removeprefix("--").replace("-", "_")
    return instead_of(key) or instead_of(key.replace("_", ".", 1))
