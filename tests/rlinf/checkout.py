"""What RLinf's source says, read without running it; for tests that compare rlinf_actors with a checkout."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from pathlib import Path

import pytest

import rlinf_actors

SOURCE = Path(os.environ["RLINF_SRC"]) if os.environ.get("RLINF_SRC") else None
NEEDS_SOURCE = pytest.mark.skipif(SOURCE is None, reason="RLINF_SRC does not name a checkout of RLinf")

CLASSES = {
    "Worker": "worker/worker.py",
    "WorkerGroup": "worker/worker_group.py",
    "WorkerGroupFuncResult": "worker/worker_group.py",
    "Cluster": "cluster/cluster.py",
    "Channel": "channel/channel.py",
    "ComponentPlacement": "placement/placement.py",
    "PackedPlacementStrategy": "placement/packed.py",
}
"""Classes whose members rlinf_actors.dropin.class_members compares, and their files in rlinf.scheduler."""


def scheduler() -> Path:
    """Return the directory of rlinf.scheduler in the checkout."""
    assert SOURCE is not None
    return SOURCE / "rlinf" / "scheduler"


def module_name(path: Path) -> str:
    """Return the path of the module in the file *path* below rlinf.scheduler, "" for rlinf.scheduler itself."""
    parts = path.relative_to(scheduler()).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def defined(path: Path) -> set[str]:
    """Return the names that the module in the file *path* defines at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def exported(path: Path) -> list[str]:
    """Return __all__ of the package whose __init__ is the file *path*."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def members(path: Path, cls: str) -> set[str]:
    """Return the members that the class *cls* in the file *path* defines or assigns, without dunder names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == cls:
            found |= members_of(node)
    return {name for name in found if not name.startswith("__")}


def members_here(cls: type) -> set[str]:
    """Return the members of a class of rlinf_actors, with those that its methods assign."""
    found = set(dir(cls))
    for base in cls.__mro__:
        if base.__module__.startswith("rlinf_actors"):
            for node in ast.walk(ast.parse(inspect.getsource(sys.modules[base.__module__]))):
                if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                    found |= members_of(node)
    return found


def lacking(cls: str) -> set[str]:
    """Return the members of the class *cls* of rlinf.scheduler that the class of rlinf_actors lacks."""
    return members(scheduler() / CLASSES[cls], cls) - members_here(getattr(rlinf_actors, cls))


def members_of(node: ast.ClassDef) -> set[str]:
    """Return the members that the class *node* defines or assigns."""
    found = set()
    for inner in node.body:
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(inner.name)
        elif isinstance(inner, ast.Assign):
            found |= {one.id for one in inner.targets if isinstance(one, ast.Name)}
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            found.add(inner.target.id)
    for inner in ast.walk(node):
        stored = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if stored and isinstance(inner.value, ast.Name) and inner.value.id in ("self", "cls"):
            found.add(inner.attr)
    return found
