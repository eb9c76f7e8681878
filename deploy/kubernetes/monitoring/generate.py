"""Write the Prometheus operator's objects, from deploy/prometheus: scraping, rules and alerts.

    python deploy/kubernetes/monitoring/generate.py

A test fails when that has to be done again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PROMETHEUS = HERE.parents[1] / "prometheus"

RUNBOOK = "https://rdzvd.rdzv.svc:29480/web/runbook.html"
"""The link target of alerts: the operator sets no `external_labels` for it."""

HEAD = "# Made by generate.py from deploy/prometheus; change it there.\n"

Json = dict[str, Any]


def _read(name: str) -> Json:
    found: Json = yaml.safe_load((PROMETHEUS / name).read_text())
    return found


def _named(kind: str, spec: Json) -> Json:
    metadata = {"name": "rdzvd", "labels": {"app": "rdzvd"}}
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": kind}
    return {**head, "metadata": metadata, "spec": spec}


def prometheus_rule() -> Json:
    """Return the rules and alerts."""
    groups = _read("rules.yml")["groups"] + _read("alerts.yml")["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        if "annotations" in rule:
            url = rule["annotations"]["runbook_url"]
            rule["annotations"]["runbook_url"] = url.replace(
                "{{ $externalLabels.rdzv_runbook }}", RUNBOOK
            )
    return _named("PrometheusRule", {"groups": groups})


def service_monitor() -> Json:
    """Return the servers' scrape configuration, with a token from the secret rdzvd-metrics."""
    endpoint = {
        "port": "http",
        "scheme": "https",
        "interval": _read("prometheus.yml")["global"]["scrape_interval"],
        "authorization": {"credentials": {"name": "rdzvd-metrics", "key": "token"}},
        "tlsConfig": {
            "ca": {"configMap": {"name": "rdzvd-ca", "key": "ca.crt"}},
            # Pods are scraped by their addresses, which are in no certificate.
            "serverName": "rdzvd.rdzv.svc",
        },
        # Alerts and dashboards distinguish the programs by this label.
        "relabelings": [{"targetLabel": "rdzv_kind", "replacement": "server"}],
    }
    selector = {"matchLabels": {"app": "rdzvd"}}
    return _named("ServiceMonitor", {"selector": selector, "endpoints": [endpoint]})


def written(document: Json) -> str:
    """Write a manifest."""
    return HEAD + yaml.safe_dump(document, sort_keys=False, width=110)


FILES = {"prometheusrule.yaml": prometheus_rule, "servicemonitor.yaml": service_monitor}
"""The contents, by the name of the file."""


def main() -> None:
    """Write the files."""
    for name, made in FILES.items():
        (HERE / name).write_text(written(made()))


if __name__ == "__main__":
    main()
