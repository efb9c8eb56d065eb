"""Every task has an owner that sees its failure: tasks are made in few places."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MAKES = {"create_task", "ensure_future", "run_coroutine_threadsafe"}
OWNERS = {
    "rlinf_actors/group/mapping.py": "the task that asks for the user's next item; MapResult raises its failure",
    "rlinf_actors/net/loop.py": "Tasks, and IoThread.submit, whose caller has the future",
    "rlinf_actors/worker/executors.py": "tasks of the user's class, on the loop that is the user's",
}
FILES = sorted(path for package in ("rlinf_actors", "agentd") for path in (ROOT / package).rglob("*.py"))


def groups(tree: ast.AST) -> set[str]:
    """Names of task groups: ``async with TaskGroup() as name``."""
    return {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and ast.unparse(item.context_expr) == "TaskGroup()"
    }


def bare(source: str) -> list[str]:
    if not any(name in source for name in MAKES):
        return []
    tree = ast.parse(source)
    owned = groups(tree)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        by = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in MAKES and not (isinstance(by, ast.Name) and by.id in owned):
            found.append(f"line {node.lineno}: {ast.unparse(node)[:80]}")
    return found


@pytest.mark.slow
def test_no_task_is_made_without_an_owner():
    found = {str(path.relative_to(ROOT)): bare(path.read_text()) for path in FILES}
    idle = [path for path in OWNERS if not found[path]]
    assert not idle, f"they make no task any more: take them from the list: {idle}"
    made = {path: calls for path, calls in found.items() if calls and path not in OWNERS}
    assert not made, f"use net.loop.Tasks, which sees the failure of a task: {made}"


def test_only_net_loop_wakes_a_loop():
    woken = [str(path.relative_to(ROOT)) for path in FILES if ".call_soon_threadsafe(" in path.read_text()]
    assert woken == ["rlinf_actors/net/loop.py"], "use net.loop.call_soon, which does not wake a loop that is awake"


@pytest.mark.parametrize(
    "source",
    [
        "asyncio.create_task(work())",
        "loop.create_task(work())",
        "asyncio.get_running_loop().create_task(work())",
        "x = asyncio.ensure_future(work())",
        "asyncio.run_coroutine_threadsafe(work(), loop)",
        "create_task(work())",
        "async def f():\n    async with TaskGroup() as tasks: ...\n    other.create_task(work())",
    ],
)
def test_a_bare_task_is_found(source):
    assert len(bare(source)) == 1


def test_a_task_group_is_an_owner():
    assert not bare("async def f():\n    async with TaskGroup() as tasks:\n        tasks.create_task(work())")
