"""Lists what a program uses of `rlinf.scheduler` and `ray` that rlinf_actors.dropin does not have.

It reads the program's source and runs nothing of it. Uses are found where the source shows them: imports, attributes of
imported modules and classes, strings with a full name (as for ``mock.patch``), ``self`` in subclasses of Worker, and
variables that are assigned or annotated in the same file. `rlinf-actors dropin --check` prints the result.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlinf_actors.dropin.class_members import MEMBERS
from rlinf_actors.dropin.finder import RAY, SCHEDULER, missing, names_of
from rlinf_actors.dropin.table import CHECKOUT, MODULES, PACKAGES, RAY_NAMES, Absent

_FULL_NAME = re.compile(rf"{re.escape(SCHEDULER)}(\.\w+)+")
_MAKERS = {  # last part of a called name -> the class of what the call returns
    "create_channel": "Channel",
    "connect_channel": "Channel",
    "launch": "WorkerGroup",
}


@dataclass(frozen=True, order=True)
class UnservedName:
    """A name that is not served, and its uses in one file: first line, name, what to do, number of other uses."""

    path: str
    line: int
    name: str
    text: str
    more: int = 0

    def __str__(self) -> str:
        more = f" (and {self.more} more use{'s' if self.more > 1 else ''})" if self.more else ""
        return f"{self.path}:{self.line}: {self.name}: {self.text}{more}"


@dataclass
class _Class:
    """A class of the program: the names of its bases, the names that it defines, and where it uses names of self."""

    bases: list[str]
    defined: set[str] = field(default_factory=set)
    used: list[tuple[str, int]] = field(default_factory=list)


def check(path: Path) -> list[UnservedName]:
    """Return the findings in the Python file *path*, or in all Python files below the directory *path*."""
    sources = [_Source(file) for file in python_files(path)]
    findings = [finding for source in sources for finding in source.findings]
    classes = {name: found for source in sources for name, found in source.classes.items()}
    for source in sources:
        for found in source.classes.values():
            findings += source.of_self(found, classes)
    uses: dict[tuple[str, str], list[UnservedName]] = {}
    for finding in sorted(set(findings)):
        uses.setdefault((finding.path, finding.name), []).append(finding)
    return sorted(replace(first, more=len(rest)) for first, *rest in uses.values())


def python_files(path: Path) -> list[Path]:
    """Return *path* if it is a file, else the files below it, without hidden directories and RLinf's scheduler."""
    return [path] if path.is_file() else sorted(_below(path))


def _below(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        scheduler = Path(here).name == "rlinf" and "scheduler" in folders
        folders[:] = [name for name in folders if name[0] != "." and not (scheduler and name == "scheduler")]
        yield from (path for name in files if name.endswith(".py") and (path := Path(here, name)).is_file())


class _Source:
    """One file: its findings, and its classes for those that depend on other files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: list[UnservedName] = []
        self.classes: dict[str, _Class] = {}
        self._names: dict[str, str] = {}  # name in this file -> full name of what it was imported from
        self._types: dict[str, str] = {}  # name of a variable -> class of rlinf.scheduler
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self._add(getattr(error, "lineno", 0) or 0, "file", f"cannot be read: {error}")
            return
        nodes = list(ast.walk(tree))
        for node in nodes:
            self._imports(node)
        for node in nodes:
            self._variables(node)
        for node in nodes:
            self._uses(node)
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = self._class(node)

    def of_self(self, found: _Class, classes: Mapping[str, _Class]) -> list[UnservedName]:
        """Return the findings about ``self`` in the class *found*, if it derives from a class of rlinf.scheduler."""
        own, served, seen, left = set(found.defined), set(), set(), list(found.bases)
        while left:
            base = left.pop()
            last = base.rpartition(".")[2]
            if _is_served(base):
                served.add(last)
            elif last in classes and last not in seen:
                seen.add(last)
                own |= classes[last].defined
                left += classes[last].bases
        return [
            UnservedName(str(self.path), line, f"{cls}.{name}", MEMBERS[cls][name].text)
            for cls in sorted(served & MEMBERS.keys())
            for name, line in found.used
            if name in MEMBERS[cls] and name not in own
        ]

    def _add(self, line: int, name: str, text: str) -> None:
        self.findings.append(UnservedName(str(self.path), line, name, text))

    def _imports(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for one in node.names:
                self._names[one.asname or one.name.partition(".")[0]] = (
                    one.name if one.asname else one.name.partition(".")[0]
                )
                self._check(one.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            module = self._absolute(node)
            for one in node.names:
                full = f"{module}.{one.name}"
                self._names[one.asname or one.name] = full
                if one.name != "*":
                    self._check(full, node.lineno)
                elif _is_served(module):
                    self._check(module, node.lineno)

    def _absolute(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module from which *node* imports; relative names by the directories around."""
        if not node.level:
            return node.module or ""
        folder = self.path.resolve().parent
        parts: list[str] = []
        while (folder / "__init__.py").exists():
            parts.insert(0, folder.name)
            folder = folder.parent
        above = parts[: len(parts) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])

    def _variables(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if made := self._made(node.value):
                self._types.update({name: made for name in map(_dotted, targets) if name})
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            said = node.annotation
            text = said.value if isinstance(said, ast.Constant) and isinstance(said.value, str) else _dotted(said)
            cls = self._full(text or "").rpartition(".")[2] if _is_served(self._full(text or "")) else ""
            name = node.arg if isinstance(node, ast.arg) else _dotted(node.target)
            if cls in MEMBERS and name:
                self._types[name] = cls

    def _made(self, value: ast.expr) -> str:
        """Return the class of rlinf.scheduler whose object *value* makes, "" if the source does not show one."""
        if not isinstance(value, ast.Call):
            return ""
        if isinstance(value.func, ast.Attribute) and value.func.attr in _MAKERS:
            return _MAKERS[value.func.attr]
        full = self._full(_dotted(value.func) or "")
        if not _is_served(full):
            return ""
        *_, holder, last = full.split(".")
        return last if last in MEMBERS else (holder if holder == "Channel" and last in ("create", "connect") else "")

    def _uses(self, node: ast.AST) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FULL_NAME.fullmatch(node.value):
            self._check(node.value, node.lineno)
        if not isinstance(node, ast.Attribute):
            return
        if (cls := self._made(node.value)) and node.attr in MEMBERS.get(cls, {}):
            self._add(node.lineno, f"{cls}.{node.attr}", MEMBERS[cls][node.attr].text)
        if (dotted := _dotted(node)) is None:
            return
        self._check(self._full(dotted), node.lineno)
        variable, _, name = dotted.rpartition(".")
        cls = self._types.get(variable, "")
        if name in MEMBERS.get(cls, {}):
            self._add(node.lineno, f"{cls}.{name}", MEMBERS[cls][name].text)

    def _class(self, node: ast.ClassDef) -> _Class:
        found = _Class([self._full(base) for base in map(_dotted, node.bases) if base])
        for inner in ast.walk(node):
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.defined.add(inner.name)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                found.defined.add(inner.id)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                if isinstance(inner.ctx, ast.Store):
                    found.defined.add(inner.attr)
                else:
                    found.used.append((inner.attr, inner.lineno))
        return found

    def _full(self, dotted: str) -> str:
        """Return *dotted* with its first part replaced by what this file imported under that name."""
        first, dot, rest = dotted.partition(".")
        return f"{self._names[first]}{dot}{rest}" if first in self._names else ""

    def _check(self, full: str, line: int) -> None:
        """Add a finding if *full*, a full name, is below rlinf.scheduler or ray and is not served."""
        if full == RAY or full.startswith(RAY + "."):
            wrong = not any(full == name or full.startswith(name + ".") for name in _whole(RAY_NAMES))
            if wrong and full not in _above(RAY_NAMES):
                self._add(line, full, "needs Ray itself; rlinf_actors.dropin serves only a few names of it")
        elif _is_served(full):
            self._check_served(full.split(".")[2:], full, line)

    def _check_served(self, parts: list[str], full: str, line: int) -> None:
        if parts and parts[0] in CHECKOUT:
            return  # comes from the checkout, with all that it has
        module = ""
        while parts and (below := ".".join(filter(None, [module, parts[0]]))) in {*MODULES, *PACKAGES}:
            module, parts = below, parts[1:]
        if not parts:
            return
        where = f"{SCHEDULER}.{module}".rstrip(".")
        place = names_of(module).get(parts[0])
        if not isinstance(place, str):
            if not parts[0].startswith("__"):
                self._add(line, f"{where}.{parts[0]}", place.text if place else missing(where, parts[0], None))
        elif len(parts) > 1 and isinstance(member := MEMBERS.get(parts[0], {}).get(parts[1]), Absent):
            self._add(line, f"{parts[0]}.{parts[1]}", member.text)


def _is_served(full: str) -> bool:
    return full == SCHEDULER or full.startswith(SCHEDULER + ".")


def _whole(names: Iterable[str]) -> list[str]:
    """Return the full names of the classes and functions *names* of Ray."""
    return [f"{RAY}.{name}" for name in names]


def _above(names: Iterable[str]) -> set[str]:
    """Return the modules that hold *names*, by their full names."""
    return {".".join([RAY, *name.split(".")[:count]]) for name in names for count in range(name.count(".") + 1)}


def _dotted(node: ast.AST) -> str | None:
    """Return the dotted name that *node* is, such as ``a.b.c``; None if it is another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None
