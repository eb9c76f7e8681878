"""The output of `kubectl kustomize` for the folders of deploy/kubernetes, as far as they need it.

It supports resources, a namespace, ConfigMaps from files and JSON patches; unknown fields are
refused. Unlike kustomize, it adds no hash to the names of ConfigMaps and the references to them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "ClusterTrainingRuntime", "Namespace"}

FIELDS = {
    *("apiVersion", "kind", "namespace", "resources", "configMapGenerator", "patches"),
}


def render(folder: Path) -> list[Object]:
    """Return all objects of a folder, in the order of its resources."""
    (asked,) = yaml.safe_load_all((folder / "kustomization.yaml").read_text())
    assert set(asked) <= FIELDS, f"{folder}: {set(asked) - FIELDS} is not known here"
    assert asked["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
    assert asked["kind"] == "Kustomization"
    found: list[Object] = []
    for resource in asked.get("resources", ()):
        place = folder / resource
        found += render(place) if place.is_dir() else yaml.safe_load_all(place.read_text())
    for made in asked.get("configMapGenerator", ()):
        assert set(made) == {"name", "files"}
        data = {name: (folder / name).read_text() for name in made["files"]}
        head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}}
        found.append({**head, "data": data})
    for patch in asked.get("patches", ()):
        _patch(found, patch)
    for each in found:
        if "namespace" in asked and each["kind"] not in CLUSTER_WIDE:
            each["metadata"]["namespace"] = asked["namespace"]
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names)), f"{folder}: an object is there twice"
    return found


def _patch(objects: list[Object], patch: Object) -> None:
    assert set(patch) == {"target", "patch"}
    target = patch["target"]
    assert set(target) == {"kind", "name"}
    (found,) = [
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
    ]
    for operation in yaml.safe_load(patch["patch"]):
        apply(found, operation)


def apply(item: Object, operation: Object) -> None:
    """Apply one operation of a JSON patch (RFC 6902): add, replace or remove."""
    *parents, last = operation["path"].removeprefix("/").split("/")
    at: Any = item
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    value = copy.deepcopy(operation.get("value"))
    match operation["op"], at:
        case "add", list():
            at.insert(len(at) if last == "-" else int(last), value)
        case "add", dict():
            at[last] = value
        case "replace", dict():
            assert last in at, f"{operation['path']} is not there"
            at[last] = value
        case "remove", dict():
            del at[last]
        case other:
            raise AssertionError(f"{other[0]} at {operation['path']} is not known here")
