"""The loop that keeps rdzvd's nodes in the state that the cluster requires.

It plans after each change in the cluster and at least every `EVERY_S`, so it catches up after rdzvd
or the API server was down. Failures are retried with backoff.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from rdzv.client import ControlClient
from rdzv.errors import RendezvousError, UnknownNodeError
from rdzv_kube.following import Following
from rdzv_kube.objects import Cluster, Machine, Pod
from rdzv_kube.plan import MARK, Command, Cordon, Drain, Lift, Rules, decide

log = logging.getLogger("rdzv.kube")

EVERY_S = 5.0
TOGETHER_S = 0.1
"""How long to collect further changes after the first, because draining a machine changes many
pods."""

LONGEST_S = 30.0
"""The longest wait after consecutive failures."""


class Reconciling:
    """Brings rdzvd's nodes to the state that a cluster requires."""

    def __init__(
        self,
        machines: Following[Machine],
        pods: Following[Pod],
        client: Callable[[], ControlClient],
        rules: Rules,
        changed: threading.Event,
    ) -> None:
        self._machines = machines
        self._pods = pods
        self._client = client
        self._rules = rules
        self._changed = changed
        self._failures = 0
        self._said = frozenset[str]()

    def run(self, stop: threading.Event) -> None:
        """Reconcile until `stop` is set; to end the current wait, set `changed` as well."""
        while not stop.is_set():
            self._changed.clear()
            try:
                self.once()
                self._failures = 0
            except RendezvousError as error:
                self._failures += 1
                self._say(f"rdzvd cannot be updated: {error}; trying again")
            wait_s = min(EVERY_S * 2 ** max(self._failures - 1, 0), LONGEST_S)
            if self._failures:
                stop.wait(wait_s * random.uniform(0.5, 1))
            elif self._changed.wait(wait_s):
                stop.wait(TOGETHER_S)

    def once(self) -> None:
        """Make one plan from the cluster and rdzvd's nodes, and carry it out.

        Does nothing until machines and pods have been listed.

        Raises:
            RendezvousError: rdzvd is unreachable or refuses; the next plan covers what remains.

        """
        machines, pods = self._machines.objects, self._pods.objects
        if machines is None or pods is None:
            return
        current = not (self._machines.trouble or self._pods.trouble)
        cluster = Cluster(machines, pods, current=current)
        with self._client() as client:
            found = decide(cluster, client.nodes(), self._rules, time.time())
            for doubt in found.doubts:
                self._say(doubt)
            self._said &= frozenset(found.doubts)
            for command in found.commands:
                _do(client, command)

    def _say(self, text: str) -> None:
        """Log a warning unless it has already been logged and still holds."""
        if text not in self._said:
            log.warning("%s", text)
        self._said |= {text}


def _do(client: ControlClient, command: Command) -> None:
    name = command.node_id
    try:
        match command:
            case Drain(_, deadline_s, reason):
                # Kubernetes takes the node in any case.
                client.drain(name, round(deadline_s * 1000), reason, force=True)
                log.warning("draining %s within %.0f s: %s", name, deadline_s, reason)
            case Cordon(_, reason):
                client.cordon(name, reason)
                log.info("cordoned %s: %s", name, reason)
            case Lift(_, cordon):
                client.undrain(name, f"{MARK}no longer about to leave", cordon=cordon)
                log.info("%s is no longer %s", name, "cordoned" if cordon else "drained")
    except UnknownNodeError:
        log.info("%s has left in the meantime", name)
