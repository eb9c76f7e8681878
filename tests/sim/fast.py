"""Makes values and tasks cheaply: nothing that a history does or says is changed by it.

A history makes thousands of values, and a frozen dataclass is slow to make: each field is set past
the guard that keeps it from being set. `thaw` takes the guard away, in this process only. That
nobody sets a field of a value is for mypy to say, which sees all of the code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

_REPLACERS: dict[type, Callable[..., Any]] = {}
_slow_replace = dataclasses.replace


def forget_tasks() -> None:
    """Keep asyncio from remembering every task; nobody asks this process for them."""
    if (tasks := getattr(asyncio.tasks, "_all_tasks", None)) is not None:
        tasks.add = lambda task: None


def thaw(*packages: str) -> None:
    """Make the frozen dataclasses of these packages, as far as imported, cheap to make."""
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in packages]
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, type) and value not in _REPLACERS and _is_frozen(value):
                _thaw(value)
        if vars(module).get("replace") is _slow_replace:
            module.replace = replace  # type: ignore[attr-defined]


def replace(value: Any, /, **changes: Any) -> Any:
    """Do what `dataclasses.replace` does."""
    replacer = _REPLACERS.get(value.__class__)
    return _slow_replace(value, **changes) if replacer is None else replacer(value, **changes)


def _is_frozen(cls: type) -> bool:
    parameters = vars(cls).get("__dataclass_params__")
    return parameters is not None and bool(parameters.frozen)


def _thaw(cls: Any) -> None:
    fields = dataclasses.fields(cls)
    if hasattr(cls, "__post_init__") or not all(f.init and not f.kw_only for f in fields):
        return
    plain = dataclasses.make_dataclass(cls.__name__, [(f.name, Any, _copy(f)) for f in fields])
    cls.__init__ = plain.__init__  # type: ignore[misc]
    del cls.__setattr__, cls.__delattr__
    _REPLACERS[cls] = _replacer(cls, [f.name for f in fields])


def _copy(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return dataclasses.field(default=field.default)


def _replacer(cls: type, names: list[str]) -> Callable[..., Any]:
    """Write the function that replaces fields of one class: no loop over them is left in it."""
    arguments = "".join(f", {name}=_old" for name in names)
    values = ", ".join(f"_value.{name} if {name} is _old else {name}" for name in names)
    scope: dict[str, Any] = {"_cls": cls, "_old": object()}
    exec(f"def replacer(_value{', *' if names else ''}{arguments}): return _cls({values})", scope)
    replacer: Callable[..., Any] = scope["replacer"]
    return replacer
