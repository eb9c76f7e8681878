"""Settings and options that were removed, and what to do in place of each."""

from __future__ import annotations

_SERVER = "rdzv.server"

CONSTANTS = {
    "forming.claims_quiet": "rdzv.core.life.restoring.CLAIMS_QUIET_MS",
    "forming.flap_hold": "rdzv.core.life.forming.FLAP_HOLD_MS",
    "forming.flap_window": "rdzv.core.life.forming.FLAP_WINDOW_MS",
    "forming.gather": "rdzv.core.life.forming.GATHER_MS",
    "forming.gather_quiet": "rdzv.core.life.forming.GATHER_QUIET_MS",
    "forming.root_cause_window": "rdzv.core.root_cause.WINDOW_MS",
    "forming.stop_margin": "rdzv.core.rounds.ranks.STOP_MARGIN_MS",
    "forming.store_backoff": "rdzv.core.life.forming.STORE_BACKOFF_MS",
    "forming.store_backoff_longest": "rdzv.core.life.forming.STORE_BACKOFF_MAX_MS",
    "lease.heartbeats": "rdzv.core.fleet.nodes.HEARTBEATS_PER_LEASE",
    "lease.reconnect_grace": "rdzv.core.model.RECONNECT_GRACE_MS",
    "limits.away": "rdzv.bounds.AWAY_MS",
    "limits.commands_per_second": f"{_SERVER}.rpc.node_messages.COMMANDS_PER_SECOND",
    "limits.http_connections": f"{_SERVER}.http.connection_limits.CONNECTIONS",
    "limits.http_connections_per_peer": f"{_SERVER}.http.connection_limits.CONNECTIONS_PER_PEER",
    "limits.http_requests": f"{_SERVER}.http.api.REQUESTS",
    "limits.inbox": f"{_SERVER}.rpc.node_messages.INBOX",
    "limits.job_timeout": "rdzv.bounds.TIMEOUT_MS",
    "limits.jobs_per_node": "rdzv.bounds.JOBS_PER_NODE",
    "limits.local_world_size": "rdzv.bounds.LOCAL_WORLD_SIZE",
    "limits.log_buffer": f"{_SERVER}.diagnosis.worker_logs.BUFFER_BYTES",
    "limits.log_readers": f"{_SERVER}.diagnosis.worker_logs.READERS",
    "limits.log_window": f"{_SERVER}.diagnosis.worker_logs.BUFFER_BYTES",
    "limits.message": f"{_SERVER}.rpc.grpc_listener.MESSAGE_BYTES",
    "limits.nodes_per_job": "rdzv.bounds.NODES_PER_JOB",
    "limits.outbox": f"{_SERVER}.sessions.connections.OUTBOX",
    "limits.scrapes": f"{_SERVER}.telemetry.server_metrics.SCRAPES",
    "limits.watchers": f"{_SERVER}.operations.job_operations.WATCHERS",
    "oidc.keys_refresh": f"{_SERVER}.security.issuer_keys.REFRESH_EVERY_S",
    "quarantine.window": "rdzv.core.fleet.quarantine.WINDOW_MS",
    "retention.events": "rdzv.stores.base.HISTORY_ROWS",
    "retention.look_every": f"{_SERVER}.engine.forgetting.PRUNE_EVERY_MS",
    "timings.deaf_after": "rdzv.runtime.clock.DEAF_AFTER_MS",
    "timings.first_request": f"{_SERVER}.http.connection_limits.FIRST_REQUEST_S",
    "timings.handshake": f"{_SERVER}.rpc.grpc_listener.HANDSHAKE_MS",
    "timings.hello_timeout": f"{_SERVER}.rpc.rendezvous_service.HELLO_TIMEOUT_S",
    "timings.leaderless_hold": f"{_SERVER}.replication.replica.LEADERLESS_HOLD_S",
    "timings.log_answer": f"{_SERVER}.diagnosis.worker_logs.ANSWER_MS",
    "timings.metrics_of_ended": f"{_SERVER}.telemetry.server_metrics.ENDED_JOB_MS",
    "timings.stop_grace": f"{_SERVER}.driver.STOP_GRACE_MS",
    "timings.store_retry": f"{_SERVER}.engine.store_access.STORE_RETRY_MS",
}
"""The constant that took the place of each setting that nobody set."""

TABLES = frozenset(key.partition(".")[0] for key in CONSTANTS)

REMOVED = {
    "notify.style": "each event is posted as JSON, with its sentence in `text`; leave it out, and "
    "for a chat use Alertmanager or the receiver in docs/operations.md",
    **{key: f"it is the constant {name}; leave it out" for key, name in CONSTANTS.items()},
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
