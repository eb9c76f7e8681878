"""Nodes and pods are followed through everything that a stand-in for an API server may do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rdzv_kube import following
from rdzv_kube.following import Following, connected, following_of
from rdzv_kube.objects import Machine, Pod

from rdzv.errors import InvalidRequestError
from tests.support.kubernetes_stand_in import StandIn, machine, pod, standing_in, until

pytestmark = pytest.mark.slow

OUT = "node.kubernetes.io/out-of-service"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "BACKOFF_S", (0.01, 0.05))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in() as running:
        yield running


class Followed:
    """The machines and pods of a stand-in, as they are seen."""

    def __init__(self, api: StandIn, folder: Path, namespace: str = "") -> None:
        self.changed = threading.Event()
        self.machines: Following[Machine]
        self.pods: Following[Pod]
        client = connected(api.kubeconfig(folder / "kubeconfig"))
        self.machines, self.pods = following_of(client, namespace, "rdzv=node", self.changed.set)

    def tainted(self) -> dict[str, bool]:
        return {one.name: bool(one.taints) for one in self.machines.objects or ()}

    def names(self) -> list[str]:
        return sorted(str(one) for one in self.pods.objects or ())


@contextmanager
def followed(api: StandIn, folder: Path, namespace: str = "") -> Iterator[Followed]:
    found, stop = Followed(api, folder, namespace), threading.Event()
    threads = [
        threading.Thread(target=one.run, args=(stop,)) for one in (found.machines, found.pods)
    ]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        api.stop()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def test_objects_are_listed_in_pages_and_then_watched(api: StandIn, tmp_path: Path) -> None:
    for number in range(5):
        api.put(machine(f"m{number}"))
    api.page = 2
    api.put(pod("train-0"))
    api.put({**pod("web"), "metadata": {"name": "web", "namespace": "team-a", "labels": {}}})
    with followed(api, tmp_path) as seen:
        until(lambda: seen.names() and len(seen.tainted()) == 5)
        assert seen.names() == ["team-a/train-0"], "others than those that were selected are not"
        api.put(machine("m1", OUT))
        api.delete(machine("m4"))
        until(lambda: seen.tainted() == {"m0": False, "m1": True, "m2": False, "m3": False})
        assert not seen.machines.trouble
    assert [one["limit"] for one in api.asked if "limit" in one] == ["500"] * 4


def test_pods_of_one_namespace_are_asked_for_there(api: StandIn, tmp_path: Path) -> None:
    api.put(pod("train-0"))
    with followed(api, tmp_path, "team-a") as seen:
        until(seen.names)
    assert "/api/v1/namespaces/team-a/pods" in {one["path"] for one in api.asked}


def test_a_watch_that_is_cut_goes_on_where_a_bookmark_said(api: StandIn, tmp_path: Path) -> None:
    def versions() -> list[str | None]:
        asked = [one for one in api.asked if one["path"].endswith("/nodes")]
        return [one.get("resourceVersion") for one in asked]

    api.put(machine("m0"))
    with followed(api, tmp_path) as seen:
        until(seen.tainted)
        for number in range(3):
            # Only other objects: bookmarks alone show the watch of nodes how far it is.
            api.put(pod(f"train-{number}"))
        until(lambda: len(seen.names()) == 3)
        until(lambda: seen.machines.version == "104")
        api.cut()
        until(lambda: versions() == [None, "101", "104"])
        api.put(machine("m0", OUT))
        until(lambda: seen.tainted() == {"m0": True})
        assert not seen.machines.trouble, "every watch ends some time"


@pytest.mark.parametrize("as_event", [False, True], ids=["status", "event"])
def test_what_is_gone_is_listed_again(api: StandIn, tmp_path: Path, as_event: bool) -> None:
    api.gone_as_event = as_event
    api.put(machine("m0"))
    api.put(machine("m1"))
    with followed(api, tmp_path) as seen:
        until(lambda: len(seen.tainted()) == 2)
        # Both happen while the watch is interrupted.
        api.lose_next(machine("m0", OUT))
        api.forget()
        until(lambda: seen.tainted() == {"m0": True, "m1": False})
        api.put(machine("m1", OUT))
        until(lambda: seen.tainted() == {"m0": True, "m1": True})


def test_slow_answers_and_refusals_are_said_and_survived(
    api: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(following, "SILENT_S", 0.2)
    api.put(machine("m0"))
    with caplog.at_level(logging.INFO, "rdzv.kube"), followed(api, tmp_path) as seen:
        until(seen.tainted)
        api.slow_s = 0.5

        def is_cut_off() -> bool:
            api.cut()  # Again at each look: a watch may not have been open yet.
            return "does not answer in time" in seen.machines.trouble

        until(is_cut_off)
        api.slow_s, api.refuses = 0, 403
        until(lambda: "403" in seen.machines.trouble)
        assert seen.tainted() == {"m0": False}, "what was seen last"
        api.lose_next(machine("m0", OUT))
        api.forget()
        api.refuses = None
        until(lambda: seen.tainted() == {"m0": True} and not seen.machines.trouble)
    assert "the API server answers 403: the caller has no permission (see RBAC)" in caplog.text


@pytest.mark.parametrize("version", ["7", "99999999", "so-to-speak"])
def test_wrong_resource_versions_are_made_up_for(
    api: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Too old: events come twice. Too new: they do not come until the next list."""
    monkeypatch.setattr(following, "RELIST_S", 0.1)
    monkeypatch.setattr(following, "WATCH_S", 0.1)
    api.says_version = version
    api.put(machine("m0"))
    api.put(machine("m0", OUT))
    with followed(api, tmp_path) as seen:
        until(lambda: seen.tainted() == {"m0": True})
        api.put(machine("m1", OUT))
        until(lambda: seen.tainted() == {"m0": True, "m1": True})
        api.lose_next(machine("m0"))
        until(lambda: seen.tainted() == {"m0": False, "m1": True})


def test_a_list_without_a_version_is_refused_in_words(api: StandIn, tmp_path: Path) -> None:
    api.says_version = ""
    with followed(api, tmp_path) as seen:
        until(lambda: "a list without a resource version" in seen.machines.trouble)
        assert seen.machines.objects is None


def test_where_there_is_no_cluster_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"outside a pod, give --kubeconfig"):
        connected(None)
    with pytest.raises(InvalidRequestError, match=r"--kubeconfig .*nowhere"):
        connected(tmp_path / "nowhere")
