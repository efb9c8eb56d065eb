"""Counts the operations of the head, those inside C too. A count does not depend on the machine or its load.

`Operations` counts the bytecode instructions of all Python code. A loop in C over a table of the head, as in `list(d)`,
`sorted(d)`, `x in list` or `d.copy()`, is one instruction however long the table is. So `instrument` replaces each
table that grows with the cluster by a subclass that counts each element that is looked at.
"""

from __future__ import annotations

import collections
import enum
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

TABLE = 40
"""Tables with fewer elements are not replaced."""


class Operations:
    """The counter that all instrumented tables share."""

    count = 0
    counting = False

    def __call__(self, act: Callable[[], object]) -> int:
        """Return the number of operations of *act*."""

        def trace(frame, event, arg):
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self.count += event == "opcode"
            return trace

        self.count, self.counting, before = 0, True, sys.gettrace()
        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(before)
            self.counting = False
        return self.count


operations = Operations()


def looked_at(elements: Iterable[Any]) -> Iterator[Any]:
    """Yield the elements, and count them. The generator's own instructions are counted too: about five for each."""
    for element in elements:
        if operations.counting:
            operations.count += 1
        yield element


def whole(name: str) -> Callable[..., Any]:
    """Return a method that counts as many operations as the table has elements, and does what *name* does."""

    def method(self, *args):
        if operations.counting:
            operations.count += len(self)
        return getattr(super(type(self), self), name)(*args)

    return method


def counting(base: type, iterates: Iterable[str], takes_all: Iterable[str]) -> type:
    def over(name: str) -> Callable[..., Any]:
        return lambda self: looked_at(getattr(super(type(self), self), name)())

    methods: dict[str, Any] = {name: over(name) for name in iterates}
    methods |= {name: whole(name) for name in takes_all}
    return type(f"Counting{base.__name__}", (base,), methods)


_MAPPING = ("copy", "__eq__", "__or__", "update")
COUNTING = {
    dict: counting(dict, ["__iter__"], _MAPPING),
    collections.OrderedDict: counting(collections.OrderedDict, ["__iter__"], _MAPPING),
    collections.Counter: counting(collections.Counter, ["__iter__"], [*_MAPPING, "total", "most_common"]),
    set: counting(set, ["__iter__"], ["copy", "__eq__", "__or__", "__and__", "__sub__", "union", "difference"]),
    list: counting(list, ["__iter__"], ["__contains__", "index", "remove", "copy", "insert", "sort", "__eq__"]),
    collections.deque: counting(
        collections.deque, ["__iter__"], ["__contains__", "index", "remove", "copy", "insert", "__eq__"]
    ),
}


class _View:
    """The values, items or keys of an instrumented mapping."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __iter__(self):
        return looked_at(self._view)

    def __reversed__(self):
        return looked_at(reversed(self._view))

    def __len__(self):
        return len(self._view)

    def __contains__(self, one):
        return one in self._view

    def __getattr__(self, name):
        return getattr(self._view, name)


for kind in (dict, collections.OrderedDict, collections.Counter):
    for name in ("values", "items", "keys"):
        setattr(COUNTING[kind], name, lambda self, name=name, kind=kind: _View(getattr(kind, name)(self)))


def instrument(root: object) -> list[str]:
    """Replace each large table below *root* by one that counts. Return where the tables are."""
    found: list[str] = []
    seen: set[int] = set()
    copies: dict[int, tuple[Any, Any]] = {}  # of the tables that have been replaced, with the original
    waiting: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while waiting:
        path, owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in _parts(owner):
            place = f"{path}.{name}" if isinstance(name, str) and not isinstance(owner, dict) else f"{path}[]"
            if type(value) in COUNTING and len(value) >= TABLE and _may_replace(owner, name):
                _, value = copies.setdefault(id(value), (value, _copied(value)))
                _put(owner, name, value)
                found.append(place)
            waiting.append((place, value))
    return found


def _parts(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return list(dict.items(owner))
    if isinstance(owner, (list, tuple, collections.deque)):
        return list(enumerate(list(owner)[:5000]))
    if isinstance(owner, (msgspec.Struct, enum.Enum, type, str, bytes, int, float)) or callable(owner):
        return []
    module = type(owner).__module__
    if not module.startswith("rlinf_actors.head"):
        return []
    names = [*getattr(owner, "__dict__", ()), *(n for k in type(owner).__mro__ for n in getattr(k, "__slots__", ()))]
    return [(name, getattr(owner, name)) for name in names if hasattr(owner, name)]


def _may_replace(owner: Any, name: Any) -> bool:
    return not isinstance(owner, (tuple, set)) and name != "_heap"  # heapq needs a list, and looks at log(n) elements


def _copied(table: Any) -> Any:
    made = COUNTING[type(table)].__new__(COUNTING[type(table)])
    base = type(table)
    if base is collections.deque:
        base.__init__(made, table, table.maxlen)
    elif base is collections.Counter:
        dict.update(made, table)
    else:
        base.__init__(made, table)
    return made


def _put(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        dict.__setitem__(owner, name, value)
    elif isinstance(owner, (list, collections.deque)):
        owner[name] = value
    else:
        object.__setattr__(owner, name, value)
