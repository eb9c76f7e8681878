"""Keeps track of a cluster's objects of one kind by list and watch, in its own thread.

A watch resumes at the resource version of the last event or bookmark; versions are opaque. All
objects are listed again when the server no longer knows a version (410 Gone), and every `RELIST_S`
in any case, to make up for lost events. Only this module imports the Kubernetes client.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as SilentError

from rdzv.errors import InvalidRequestError, short
from rdzv_kube.objects import Json, Machine, Pod, key_of, machine_of, pod_of

log = logging.getLogger("rdzv.kube")

WATCH_S = 60
"""The duration of each watch, as requested from the API server."""

CONNECT_S = 5.0
SILENT_S = 75.0
"""The longest silence tolerated on a connection. A watch ends by itself before that, so a longer
silence means that the connection is dead."""

RELIST_S = 300.0
BACKOFF_S = (0.5, 30.0)
PAGE = 500
MOST_OBJECTS = 100_000

Value = TypeVar("Value", Machine, Pod)
Request = Callable[..., Any]
"""A list method of the Kubernetes client, such as `CoreV1Api.list_node`."""


class GoneError(Exception):
    """The API server no longer knows the resource version."""


class AnswerError(Exception):
    """The API server sent an invalid answer; the message describes it."""


class Following(Generic[Value]):
    """The current objects of one kind. Calls `changed` from its own thread after each change."""

    def __init__(
        self,
        what: str,
        request: Request,
        read: Callable[[Json], Value],
        changed: Callable[[], None],
        selector: str = "",
    ) -> None:
        self._what = what
        self._request = request
        self._read: Callable[[Json], Value] = read
        self._changed = changed
        self._options = {"label_selector": selector} if selector else {}
        self._lock = threading.Lock()
        self._objects: dict[str, Value] | None = None
        self.version = ""
        """The resource version up to which changes have been received; empty before a list."""
        self._listed_s = 0.0
        self.trouble = "not listed yet"
        """The reason why the objects may not be current; empty if they are."""

    @property
    def objects(self) -> tuple[Value, ...] | None:
        """The objects as last seen, or None before the first list."""
        with self._lock:
            return None if self._objects is None else tuple(self._objects.values())

    def run(self, stop: threading.Event) -> None:
        """Follow the objects until `stop` is set."""
        backoff_s = BACKOFF_S[0]
        while not stop.is_set():
            try:
                if not self.version or time.monotonic() - self._listed_s > RELIST_S:
                    self._list()
                began_s = time.monotonic()
                self._watch()
                # Wait between watches in case the server ends each of them at once.
                if time.monotonic() - began_s > 1:
                    backoff_s = BACKOFF_S[0]
                    continue
            except GoneError:
                log.info("the resource version has expired; listing all %s again", self._what)
                self.version = ""
            except Exception as error:  # The client's exceptions have no common base.
                self._ill(_in_words(error))
                self.version = "" if isinstance(error, AnswerError) else self.version
            stop.wait(backoff_s * random.uniform(0.5, 1))
            backoff_s = min(backoff_s * 2, BACKOFF_S[1])

    def _well(self) -> None:
        if self.trouble:
            log.info("watching %d %s", len(self._objects or ()), self._what)
            self.trouble = ""
            self._changed()

    def _ill(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("cannot watch %s, will retry: %s", self._what, trouble)
        self.trouble = trouble

    def _list(self) -> None:
        found: dict[str, Value] = {}
        token = ""
        while True:
            answer = self._asked(limit=PAGE, _continue=token or None)
            body = json.loads(answer.data)
            items, metadata = body.get("items"), body.get("metadata") or {}
            if not isinstance(items, list | None):
                raise AnswerError("a list without items")
            found |= {key_of(item): self._read(item) for item in items or ()}
            if len(found) > MOST_OBJECTS:
                raise AnswerError(f"more than {MOST_OBJECTS} objects")
            token = metadata.get("continue") or ""
            if not token:
                break
        version = metadata.get("resourceVersion")
        if not isinstance(version, str) or not version:
            raise AnswerError("a list without a resource version")
        with self._lock:
            self._objects = found
        self.version, self._listed_s = version, time.monotonic()
        self._changed()

    def _watch(self) -> None:
        answer = self._asked(
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=self.version,
            timeout_seconds=WATCH_S,
        )
        self._well()
        try:
            for line in _lines(answer):
                self._take(json.loads(line))
        except HTTPError as error:
            # This is expected, and the next watch continues from here.
            log.debug("the watch of %s was interrupted: %s", self._what, error)
        finally:
            answer.close()

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, item = event.get("type"), event.get("object")
        if not isinstance(item, dict):
            raise AnswerError(f"an event without an object: {short(str(event))}")
        if kind == "ERROR":
            if item.get("code") == 410:
                raise GoneError
            raise AnswerError(f"{item.get('code')}: {item.get('message')}")
        version = (item.get("metadata") or {}).get("resourceVersion")
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            self._put(key_of(item), None if kind == "DELETED" else self._read(item))
        elif kind != "BOOKMARK":
            raise AnswerError(f"an event of type {short(str(kind))}")
        if isinstance(version, str) and version:
            self.version = version

    def _put(self, key: str, value: Value | None) -> None:
        with self._lock:
            assert self._objects is not None
            if self._objects.get(key) == value:
                return
            if value is None:
                self._objects.pop(key, None)
            else:
                self._objects[key] = value
        self._changed()

    def _asked(self, **options: Any) -> Any:
        given = {key: value for key, value in options.items() if value is not None}
        try:
            return self._request(
                **self._options,
                **given,
                _preload_content=False,
                _request_timeout=(CONNECT_S, SILENT_S),
            )
        except ApiException as error:
            if error.status == 410:
                raise GoneError from error
            raise


def _lines(answer: Any) -> Iterator[bytes]:
    """Yield the complete lines of a watch's response, dropping an unterminated last line."""
    left = b""
    for piece in answer.stream(amt=None, decode_content=False):
        *whole, left = (left + piece).split(b"\n")
        yield from filter(None, whole)


def _in_words(error: Exception) -> str:
    if isinstance(error, SilentError):
        return "the API server does not answer in time"
    if isinstance(error, ApiException):
        why = {
            401: ": the caller is not authenticated",
            403: ": the caller has no permission (see RBAC)",
        }
        return f"the API server answers {error.status}{why.get(error.status, '')}"
    return short(f"{type(error).__name__}: {error}".replace("\n", " "))


def connected(kubeconfig: Path | None) -> Any:
    """Return a Kubernetes client configured from `kubeconfig` or, without one, for this pod.

    Raises:
        InvalidRequestError: there is no such configuration.

    """
    try:
        if kubeconfig is not None:
            config.load_kube_config(str(kubeconfig))
        else:
            config.load_incluster_config()
    except config.ConfigException as error:
        where = f"--kubeconfig {kubeconfig}" if kubeconfig else "outside a pod, give --kubeconfig"
        raise InvalidRequestError(f"{where}: {error}") from error
    configuration = client.Configuration.get_default_copy()
    # `Following.run` does the retrying instead, with a log line and backoff.
    configuration.retries = False
    return client.CoreV1Api(client.ApiClient(configuration))


def following_of(
    api: Any, namespace: str, selector: str, changed: Callable[[], None]
) -> tuple[Following[Machine], Following[Pod]]:
    """Return the followers for a cluster's machines and for the pods that are rdzvd's nodes."""

    def of_namespace(**options: Any) -> Any:
        return api.list_namespaced_pod(namespace, **options)

    list_pods = of_namespace if namespace else api.list_pod_for_all_namespaces
    return (
        Following("nodes", api.list_node, machine_of, changed),
        Following("pods", list_pods, pod_of, changed, selector),
    )
