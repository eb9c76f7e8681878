"""The layers: which module may import which. A missing file breaks no rule."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.source_tree import MAP, SOURCES, parsed, sources

IMPURE = {
    *("asyncio", "concurrent", "ctypes", "datetime", "fcntl", "grpc", "http", "io", "logging"),
    *("mmap", "msgspec", "multiprocessing", "os", "pathlib", "queue", "random", "resource"),
    *("secrets", "select", "selectors", "shutil", "signal", "socket", "sqlite3", "ssl"),
    *("subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid", "weakref"),
}
"""Modules that read a clock, use randomness or do I/O; no core may import them."""


@dataclass(frozen=True)
class Rule:
    """Which files may not import what, and why. Paths are below `rdzv/` of any source root."""

    why: str
    files: str
    """The files that the rule covers, as a glob."""
    never: frozenset[str] = frozenset()
    """Modules that they never import, nor anything below them."""
    only: frozenset[str] | None = None
    """If given, all that they may import beside the pure part of the standard library."""
    stdlib: bool = True
    """Whether all of the standard library is allowed if `only` is given."""
    but: frozenset[str] = frozenset()
    """Files that are exempt."""


def of(*names: str) -> frozenset[str]:
    return frozenset(names)


FRAMEWORKS = ("accelerate", "lightning", "transformers")
"""Each has a module of its name in the worker's library, the only one to import it."""

RULES = (
    Rule(
        "the thing that decides does no I/O and reads no clock",
        "core/**/*.py",
        only=of("rdzv.bounds", "rdzv.errors", "rdzv.core", "rdzv.structs"),
        stdlib=False,
    ),
    Rule(
        "the agent's core decides with the words of the rendezvous, and nothing else",
        "agent/core/**/*.py",
        only=of(
            *("rdzv.bounds", "rdzv.errors", "rdzv.core", "rdzv.messages", "rdzv.structs"),
            "rdzv.agent.core",
        ),
        stdlib=False,
    ),
    Rule(
        "stores keep memberships; they do not know the wire",
        "stores/**/*.py",
        never=of("grpc"),
        but=of("stores/etcd_client.py"),
    ),
    Rule(
        "only the outermost layer knows the wire format",
        "**/*.py",
        never=of("rdzv.v1"),
        but=of(
            *("server/rpc/*_service.py", "server/rpc/grpc_listener.py", "server/wire.py"),
            *("server/rpc/node_messages.py", "server/operations/handlers.py"),
            "server/__main__.py",
            *("client.py", "transport/*.py"),
            # The agent's jobs and node only pass on messages that its link has encoded.
            *("agent/server_link/*.py", "agent/job/job_driver.py", "agent/node/node.py"),
            *("torchrun/*.py", "torchrun.py"),
            "v1/*.py",
        ),
    ),
    Rule(
        "the server's parts speak in values; gRPC and HTTP are the services'",
        "server/**/*.py",
        never=of("grpc", "aiohttp", "rdzv.v1.rdzv_pb2_grpc"),
        but=of(
            *("server/rpc/*.py", "server/http/*.py", "server/telemetry/notifications.py"),
            *("server/security/tls.py", "server/security/service_accounts.py"),
        ),
    ),
    Rule(
        "server, agent and CLI run without torch in memory",
        "**/*.py",
        never=of("torch"),
        but=of(
            *("agent/job_programs/*.py", "agent/job_programs/worker_hook/*.py"),
            *("torchrun.py", "torchrun/*.py", "c10d/store_server.py", "demo/training.py"),
            "worker/**/*.py",
        ),
    ),
    Rule(
        "the job's interpreter may have the worker's library and nothing else of rdzv",
        "worker/*.py",
        only=of("rdzv.worker", "torch"),
    ),
    Rule(
        "a job has the framework that it uses, and not the others",
        "worker/integrations/*.py",
        only=of("rdzv.worker", "torch"),
        but=of(*(f"worker/integrations/{name}.py" for name in FRAMEWORKS)),
    ),
    Rule(
        "programs that are started by path start fast, and no environment can break them",
        "agent/runner/**/*.py",
        only=of("rdzv.agent.runner"),
        but=of("agent/runner/__main__.py"),
    ),
    Rule(
        "the CUDA driver is asked by a program that is started by path",
        "agent/launch/cuda.py",
        only=of(),
    ),
    Rule(
        "the zygote runs in the job's interpreter, which may have nothing of rdzv",
        "agent/job_programs/zygote*/**/*.py",
        only=of(),
    ),
    Rule(
        "the zygote imports by itself nothing but the standard library",
        "agent/job_programs/zygote.py",
        only=of(),
    ),
    Rule(
        "what was seen of torch's jobs is told without I/O or a clock",
        "c10d/observations.py",
        only=of("rdzv.core", "rdzv.view.answers", "rdzv.structs", "msgspec"),
        stdlib=False,
    ),
    Rule(
        "torch's store is served by an interpreter that may have nothing of rdzv",
        "c10d/store_server.py",
        only=of("torch"),
    ),
    Rule(
        "the demo's training runs in the job's interpreter, which may have nothing of rdzv",
        "demo/training.py",
        only=of("torch"),
    ),
    Rule(
        "the demo asks what a user can ask, of programs of their own",
        "demo/*.py",
        never=of("rdzv.server", "rdzv.stores", "rdzv.agent", "rdzv.client", "rdzv.v1"),
    ),
    Rule(
        "the operator's command speaks to the server through the client alone",
        "ctl/**/*.py",
        never=of("rdzv.server", "rdzv.stores", "rdzv.agent", "rdzv.v1"),
    ),
    Rule(
        "etcd's own protocol is spoken by the stores alone",
        "**/*.py",
        never=of("rdzv.etcd"),
        but=of("stores/*.py", "etcd/*.py"),
    ),
    Rule(
        "a server or an agent that nobody can scrape loads no library for metrics",
        "**/*.py",
        never=of("prometheus_client"),
        but=of(
            *("runtime/exposition.py", "server/telemetry/metrics_page.py"),
            "agent/node/agent_metrics.py",
        ),
    ),
    Rule(
        "certificates are made for those who ask, and read by the TLS libraries",
        "**/*.py",
        never=of("cryptography"),
        but=of("ctl/authority.py", "agent/job/snapshots.py"),
    ),
    Rule(
        "a server that trusts no other issuer runs without PyJWT, which is an extra",
        "**/*.py",
        never=of("jwt"),
        but=of("server/security/service_accounts.py"),
    ),
    Rule(
        "a command line names servers, and is read without gRPC",
        "transport/endpoints.py",
        only=of("rdzv.errors", "rdzv.structs"),
    ),
    Rule(
        "configurations are described without knowing any program",
        "settings/*.py",
        only=of("rdzv.errors", "rdzv.settings", "rdzv.structs", "msgspec"),
    ),
)


@functools.cache
def matches(name: str, pattern: str) -> bool:
    """Match a path with a glob in which `**/` stands for any number of folders."""
    return _expression(pattern).fullmatch(name) is not None


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    parts = (re.escape(part).replace(r"\*", "[^/]*") for part in pattern.split("**/"))
    return re.compile("(?:.*/)?".join(parts))


@functools.cache
def imports(path: Path, name: str) -> frozenset[str]:
    """List the imports of a file, anywhere in it, except those for type checking only."""
    return _named_by(_imports_in(path.read_text(encoding="utf-8")), name)


def _named_by(nodes: Iterable[ast.AST], name: str) -> frozenset[str]:
    package = ["rdzv", *Path(name).parts[:-1]]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            # `from rdzv import agent` imports rdzv.agent, if that is a module.
            found |= {f"{base}.{alias.name}" for alias in node.names} if base else set()
            found |= {base}
    return frozenset(found)


_FOR_TYPES = re.compile(r"^( *)if (?:\w+\.)?TYPE_CHECKING:(?:\n\1 +.*|\n *$)*", re.M)
_IMPORT = re.compile(r"^ *(from [.\w]+ import (?:\([^)]*\)|.+)|import .+)", re.M)


def _imports_in(text: str) -> list[ast.stmt]:
    """Parse nothing but the imports: of all files, the rest takes seconds."""
    outside_of_strings = "".join(text.split('"""')[::2])
    found = _IMPORT.finditer(_FOR_TYPES.sub("", outside_of_strings))
    return ast.parse("\n".join(match[1] for match in found)).body


@pytest.mark.slow
def test_no_import_is_overlooked() -> None:
    for path, name in sources():
        assert imports(path, name) == _named_by(_at_run_time(parsed(path)), name), name


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    left = [node]
    while left:
        one = left.pop()
        if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test):
            children: Iterable[ast.AST] = one.orelse
        else:
            children = ast.iter_child_nodes(one)
        for child in children:
            if not isinstance(child, ast.expr):  # Expressions contain no imports.
                yield child
                left.append(child)


def is_below(module: str, names: frozenset[str]) -> bool:
    return not names.isdisjoint(_with_parents(module))


@functools.cache
def _with_parents(module: str) -> frozenset[str]:
    return frozenset(itertools.accumulate(module.split("."), "{}.{}".format))


@functools.cache
def _reached(path: Path, name: str) -> frozenset[str]:
    return frozenset().union(*map(_with_parents, imports(path, name)))


def offences(rule: Rule, path: Path, name: str) -> list[str]:
    """Return the violations of a rule by a file."""
    if rule.only is None and rule.never.isdisjoint(_reached(path, name)):
        return []
    found = []
    for module in imports(path, name):
        if module in ("rdzv", "__future__"):
            continue
        top = module.partition(".")[0]
        if is_below(module, rule.never):
            found.append(module)
        elif rule.only is not None and not is_below(module, rule.only):
            standard = top in sys.stdlib_module_names
            if not standard or (not rule.stdlib and top in IMPURE):
                found.append(module)
    return sorted(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.why)
def test_the_arrows_hold(rule: Rule) -> None:
    broken = [
        f"{name} imports {module}"
        for path, name in sources()
        if matches(name, rule.files)
        if not any(matches(name, exception) for exception in rule.but)
        for module in offences(rule, path, name)
    ]
    assert not broken, f"{rule.why}: {broken}"


@pytest.mark.parametrize(
    ("line", "rule", "offends"),
    [
        ("import time", RULES[0], True),
        ("from os import path", RULES[0], True),
        ("from rdzv import server", RULES[0], True),
        ("from rdzv.core.model import State", RULES[0], False),
        ("import dataclasses", RULES[0], False),
        ("def f():\n    import torch.nn", RULES[5], True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", RULES[5], False),
        ("import torchvision", RULES[5], False),
        ("import click", RULES[6], True),
        ("import subprocess", RULES[6], False),
    ],
)
def test_the_rules_see_what_breaks_them(
    line: str, rule: Rule, offends: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file.py"
    path.write_text(line, encoding="utf-8")
    assert bool(offences(rule, path, "core/file.py")) is offends


@pytest.mark.slow
def test_every_channel_to_rdzvd_is_made_in_one_place() -> None:
    makers = {
        name
        for path, name in sources()
        if "secure_channel" in path.read_text(encoding="utf-8")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in ("insecure_channel", "secure_channel")
    }
    # etcd has its own credentials.
    assert makers == {"transport/channels.py", "stores/etcd_client.py"}


_MAPPED = re.compile(r"^( *)([a-z0-9_/]+/|[a-z0-9_]+\.py) ")


def mapped() -> list[str]:
    """List folders and files of the map in ARCHITECTURE.md, by their paths below `rdzv/`."""
    text = MAP.read_text(encoding="utf-8")
    block = text[text.index("## Code map") :].split("```")[1]
    found: list[str] = []
    above: list[tuple[int, str]] = []
    for line in block.splitlines():
        if (match := _MAPPED.match(line)) is None:
            continue
        indent, name = len(match[1]), match[2]
        above = [(left, folder) for left, folder in above if left < indent]
        path = "".join(folder for _, folder in above) + name
        if name.endswith("/"):
            above.append((indent, name))
        if path.startswith(("rendezvous/rdzv/", "agent/rdzv/", "worker/rdzv/")):
            found.append(path.split("rdzv/", 1)[1])
    return [path for path in found if path]


def room_of(name: str, rooms: list[str]) -> str:
    """Return a file's entry in the map: the longest that contains it."""
    return max((room for room in rooms if f"{name}/".startswith(room)), key=len, default="")


def test_the_map_is_the_tree() -> None:
    rooms = mapped()
    lost = [name for _, name in sources() if not room_of(name, rooms) or name.count("/") > 3]
    empty = [room for room in rooms if not any((root / "rdzv" / room).exists() for root in SOURCES)]
    assert (lost, empty) == ([], [])
    flat = [
        name
        for _, name in sources()
        if room_of(name, rooms) in ("server/", "agent/") and not name.endswith("__init__.py")
    ]
    assert not flat, "neither in a folder of the map, nor on the map by itself"


def _is_of(one: str, package: str, modules: Collection[str]) -> bool:
    """Return whether a name that is imported from a package, if it is, is a module of it."""
    return one.rpartition(".")[0] != package or one in modules


@pytest.mark.slow
def test_a_folder_imports_only_what_stands_above_it_on_the_map() -> None:
    rooms = mapped()
    turn = {room: number for number, room in enumerate(rooms)}
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): room_of(name, rooms)
        for _, name in sources()
    }
    packages = {module.rpartition(".")[0] for module in modules}
    upwards = {
        f"{name} imports rdzv.{module}"
        for path, name in sources()
        for named in [{one.removeprefix("rdzv.") for one in imports(path, name)}]
        for module in named
        if module in modules
        # `from rdzv.core import model` is no use of what drivers import from rdzv.core.
        and not (module in packages and all(_is_of(one, module, modules) for one in named))
        and modules[module] not in ("server/", "agent/")
        and turn[modules[module]] > turn[room_of(name, rooms)]
    }
    assert not upwards


@pytest.mark.slow
def test_no_module_imports_itself_by_a_circle() -> None:
    """At run time. For its types, a part may name the object that hands itself to it."""
    files = {_module(name): (path, name) for path, name in sources()}
    circles = TopologicalSorter(
        {module: _modules(imports(path, name), files) for module, (path, name) in files.items()}
    )
    circles.prepare()


def _module(name: str) -> str:
    return ".".join(["rdzv", *Path(name.removesuffix("/__init__.py")).with_suffix("").parts])


def _modules(named: Collection[str], modules: Collection[str]) -> set[str]:
    """Choose the modules among imports. `from rdzv.core import model` does not use rdzv.core's."""
    found = {one for one in named if one in modules}
    return {
        one
        for one in found
        if not (below := {part for part in named if part.rpartition(".")[0] == one})
        or not below <= found
    }


def test_the_rules_are_about_files_that_are_there() -> None:
    names = [name for _, name in sources()]
    about = {rule.files for rule in RULES}
    assert {"core/model.py", "server/driver.py", "agent/runner/runner.py"} <= set(names)
    assert all(any(matches(name, files) for name in names) for files in about)
