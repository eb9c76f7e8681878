"""Tests use public names. Each private name of other code that one uses is listed with its reason.

If a test needs a private name, first look for a way to check the same thing from outside; then for
a parameter, property or function that is missing in the product for everyone. Only then add a row.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.source_tree import ROOT, parsed

DOCUMENTED = ("os._exit", "sys._current_frames", "sys._xoptions")
"""Public by the documentation of Python, in spite of the underscore."""

TORCH = "torch has nothing public for it"
PYTEST = "pytest has nothing public for it: forked tests need folders of their own"
HOOKS = "a hook has no other way to it, and a fixture for all tests would cost each of them"
PYTHON = "Python has nothing public for it"
STATE = "the public attributes of a State are those that the user gave it"
LOCKS = "the locks are what a forked child must not share"

REASONS: dict[str, dict[str, str]] = {
    "conftest.py": {"config._tmp_path_factory": HOOKS},
    "conformance/scripts/plugin/conformance_plugin.py": {"handlers._log_handlers": TORCH},
    "conformance/test_conformance.py": {"get_args_parser()._actions": PYTHON},
    "integration/test_c10d_facade.py": {
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous._NodeDesc": TORCH,
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous._RendezvousState": TORCH,
    },
    "integration/test_kept_shards_in_process.py": {
        "outside._sealing": STATE,
        "state._sealing": STATE,
    },
    "integration/test_numa_vs_torch.py": {
        "binding._get_validated_logical_cpus_to_bind_to": TORCH,
    },
    "integration/test_reconfigured.py": {
        "dist._reconfigure": TORCH,
        "dist._get_reconfigure_handle": TORCH,
    },
    "integration/test_worker_in_process.py": {
        "c10d._update_default_pg": TORCH,
        "c10d._world": TORCH,
    },
    "integration/workers/all_reduce.py": {"dist.distributed_c10d._get_default_store": TORCH},
    "sim/loop.py": {
        "events._set_running_loop": "a loop in virtual time sets it, as asyncio's own loops do",
        "task._log_destroy_pending": "a simulated crash destroys tasks that are pending",
    },
    "sim/report.py": {"asyncio.tasks._all_tasks": PYTHON},
    "support/forked.py": {"config._tmp_path_factory": PYTEST, "factory._basetemp": PYTEST},
    "support/forked_programs.py": {"atexit._run_exitfuncs": PYTHON, "threading._shutdown": PYTHON},
    "support/kept_training.py": {
        "dist.distributed_c10d._set_pg_timeout": TORCH,
        "saving._running": STATE,
    },
    "support/kept_workers.py": {"multiprocessing.current_process()._config": PYTHON},
    "support/sharded_checkpoints.py": {"state._sealing": STATE},
    "support/quick_torch/sitecustomize.py": {
        "module._C": TORCH,
        "core._set_generator_metaclass": TORCH,
    },
    "support/driven.py": {"asyncio.get_running_loop()._ready": PYTHON},
    "unit/worker/test_link.py": {"link._changed": LOCKS, "link._sending": LOCKS},
}

CALLS_WITH_NAMES = frozenset({"setattr", "getattr", "delattr", "hasattr", "setitem", "object"})
OWN = ("self", "cls", "super()")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def reaches(tree: ast.AST) -> Iterator[str]:
    """Yield each use of a private name: of an attribute, by an import, or in words."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                if ast.unparse(value) not in OWN:
                    yield ast.unparse(node)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{one.name}" for one in names if is_private(one.name))
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=args):
                if called in CALLS_WITH_NAMES:
                    yield from named(args)


def named(args: list[ast.expr]) -> Iterator[str]:
    """Yield the private name that a call like `setattr` is given, as an expression."""
    match args:
        case [ast.Constant(value=str(path)), *_] if is_private(path.rpartition(".")[2]):
            yield path
        case [owner, ast.Constant(value=str(name)), *_] if is_private(name):
            yield f"{ast.unparse(owner)}.{name}"


def test_reaches_are_found() -> None:
    text = """
from a import _b, c
x._y.z(self._own, super()._own, x.__class__)
patch.setattr(x, "_y", 1)
patch.setattr("a.b._C", 1)
getattr(x, "public")
"""
    assert sorted(reaches(ast.parse(text))) == ["a._b", "a.b._C", "x._y", "x._y"]


@pytest.mark.slow
def test_every_private_name_that_a_test_uses_is_listed_with_its_reason() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        names = {name for name in reaches(parsed(path)) if not name.endswith(DOCUMENTED)}
        if names:
            found[path.relative_to(ROOT / "tests").as_posix()] = names
    listed = {file: set(names) for file, names in REASONS.items()}
    new = [f"{file}: {name}" for file in found for name in found[file] - listed.get(file, set())]
    gone = [f"{file}: {name}" for file in listed for name in listed[file] - found.get(file, set())]
    assert not new, "use something public, or list it with its reason"
    assert not gone, "the row is no longer needed"
