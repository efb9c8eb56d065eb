"""Every call in RLinf's source of a method that rlinf_actors has fits the signature here.

The source is read, not run. What a variable is, its name says: ``channel.put(...)``, ``handle.consume_duration(...)``.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import checkout as co

import rlinf_actors
from rlinf_actors import Channel, Worker, WorkerAddress, WorkerGroup, WorkerGroupFuncResult
from rlinf_actors.group.launcher import GroupLauncher

pytestmark = co.NEEDS_SOURCE

FOLDERS = ("rlinf", "examples", "toolkits", "evaluations", "tests/unit_tests")

WORKERS = [
    "send",
    "recv",
    "send_tensor",
    "recv_tensor",
    "broadcast",
    "create_channel",
    "connect_channel",
    "send_to",
    "recv_from",
    "acquire_free_port",
    "log_on_first_rank",
    "log_on_last_rank",
    "log_debug",
    "log_info",
    "log_warning",
    "log_error",
    "worker_timer",
    "pop_execution_time",
    "pop_execution_times",
    "get_parent_rank",
    "check_worker_alive",
]
CHANNELS = ["put", "put_nowait", "get", "get_nowait", "get_batch", "qsize", "empty", "full"]
BY_RECEIVER = [
    (r"(^self|worker|_worker)$", Worker, WORKERS),
    (r"^Worker$", Worker, ["timer", "create_group", "check_worker_alive"]),
    (r"channel", Channel, CHANNELS),
    (r"^Channel$", Channel, ["create", "connect"]),
    (r"\.create_group\(", GroupLauncher, ["launch"]),
    (r"handle$|_ref$|result$", WorkerGroupFuncResult, ["wait", "done", "consume_duration", "consume_durations"]),
    (r"", WorkerGroup, ["execute_on", "from_group_name"]),
]
"""Pattern of the receiver's text, the class here, its methods. The first pattern that fits counts."""
CONSTRUCTORS = [
    "Cluster",
    "ComponentPlacement",
    "PackedPlacementStrategy",
    "NodePlacementStrategy",
    "FlexiblePlacementStrategy",
    "CollectiveGroupOptions",
    "WorkerAddress",
]

OTHERS = {"rlinf/envs/venv/venv.py": "its workers are processes behind a pipe, with a send and a recv of their own"}
"""Files whose ``self`` is no Worker, and why."""

FOREIGN = {
    "model_runner", "rank", "vllm_config",  # of vLLM's Worker
    "get_result", "send_action",  # of the workers of venv.py
    "reshard_state_dict",  # of a subclass for each version of Megatron
}  # fmt: skip
"""Attributes that classes named Worker have from elsewhere."""


class Call(NamedTuple):
    where: str
    text: str
    node: ast.Call


def calls() -> Iterator[Call]:
    assert co.SOURCE is not None
    for path in sorted(path for folder in FOLDERS for path in (co.SOURCE / folder).rglob("*.py")):
        if co.scheduler() in path.parents or str(path.relative_to(co.SOURCE)) in OTHERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield Call(f"{path.relative_to(co.SOURCE)}:{node.lineno}", ast.unparse(node.func), node)


def callee(call: Call) -> Any:
    """Return what *call* calls here; None if the call is of something else."""
    receiver, _, name = call.text.rpartition(".")
    if not receiver:
        return getattr(rlinf_actors, name) if name in CONSTRUCTORS else None
    for pattern, cls, methods in BY_RECEIVER:
        if name in methods and re.search(pattern, receiver):
            return getattr(cls, name)
    return None


def problem(function: Any, node: ast.Call) -> str:
    """Return why the arguments of *node* do not fit *function*, "" if they do."""
    if any(isinstance(arg, ast.Starred) for arg in node.args) or any(word.arg is None for word in node.keywords):
        return ""
    signature = inspect.signature(function)
    bound = inspect.ismethod(function) or isinstance(function, type) or "self" not in signature.parameters
    args = [*([] if bound else [None]), *node.args]
    try:
        signature.bind(*args, **{str(word.arg): None for word in node.keywords})
    except TypeError as error:
        return str(error)
    return ""


def test_calls_of_rlinf_fit_the_signatures_here():
    known = [(call, function) for call in calls() if (function := callee(call)) is not None]
    wrong = {
        call.where: f"{ast.unparse(call.node)}: {said}"
        for call, function in known
        if (said := problem(function, call.node))
    }
    assert len(known) > 500
    assert not wrong


class Family(NamedTuple):
    """Classes of one name: the names of their bases, the attributes that they set, and those that they read."""

    bases: set[str]
    sets: set[str]
    reads: set[str]


def families() -> dict[str, Family]:
    assert co.SOURCE is not None
    found: dict[str, Family] = {}
    for path in (co.SOURCE / "rlinf").rglob("*.py"):
        if co.scheduler() in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                family = found.setdefault(node.name, Family(set(), set(), set()))
                family.bases.update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
                family.sets.update(co.members_of(node))
                family.reads.update(
                    inner.attr
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", "") == "self"
                )
    return found


def above(name: str, found: dict[str, Family], seen: set[str]) -> set[str]:
    """Return *seen* with *name* and the names of all its bases."""
    seen.add(name)
    for base in found[name].bases - seen if name in found else ():
        above(base, found, seen)
    return seen


def test_attributes_that_rlinfs_workers_read_are_there(monkeypatch):
    found = families()
    workers = {name: above(name, found, set()) for name in found}
    workers = {name: bases for name, bases in workers.items() if "Worker" in bases}
    assert len(workers) > 50
    monkeypatch.setattr(Worker, "current_worker", None)
    here = dir(Worker(parent_address=WorkerAddress("g", 0), world_size=1, rank=0))
    missing: dict[str, set[str]] = {}
    for name in set().union(*workers.values()):
        relatives = set().union(*(bases for bases in workers.values() if name in bases))
        sets = set().union(*(found[one].sets for one in relatives if one in found))
        reads = found[name].reads if name in found else set()
        if lacking := {one for one in reads - sets - FOREIGN if one not in here}:
            missing[name] = lacking
    assert not missing
