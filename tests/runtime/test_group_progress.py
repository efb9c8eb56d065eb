"""What the line about groups says of the workers that are late."""

from __future__ import annotations

import asyncio
import types

import pytest

from rlinf_actors.runtime import group_progress
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.group_progress import GroupProgress
from rlinf_actors.runtime.progress import Facts
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.node_questions import AskNode, NodeAnswered
from rlinf_actors.wire.stack_values import Stack, StackAnswer, StackFrame, WorkerStacks
from rlinf_actors.wire.values import NodeReport, NodeState, WorkerState

IMPORTS = [StackFrame("/lib/site-packages/torch/__init__.py", 1, "<module>")]


class Group(types.SimpleNamespace):
    __hash__ = object.__hash__


def group(name: str, *states: str, up: int = 0) -> Group:
    """A group whose first *up* workers are up. Its workers are in *states*, on the nodes gpu-0, gpu-1 and so on."""
    peers = [types.SimpleNamespace(name=f"{name}:{rank}", rank=rank, node=f"gpu-{rank}") for rank in range(3)]
    known = {rank: WorkerState(f"{name}-{rank}", rank, rank, "ip", state) for rank, state in enumerate(states)}
    return Group(
        name=name, namespace="job", owned=True, closing=False, peers=peers, states=known, _late=lambda: peers[up:],
        ready=Promise("ready"), gone=Promise("gone"), preload=("numpy",),
    )  # fmt: skip


@pytest.fixture
async def shown(monkeypatch):
    """A GroupProgress of a driver that waits, whose workers import torch."""
    monkeypatch.setattr(group_progress, "all_waits", lambda: ["a wait"])
    reports = [NodeReport(f"id-{rank}", "", "", "", 1, 1, "3.11", "/p") for rank in range(3)]
    nodes = [NodeState(report, "i", rank, "ready", 0.0) for rank, report in enumerate(reports)]

    async def status(namespace: str) -> Status:
        return Status("e", "1", 1.0, nodes, [], [])

    async def ask(asked: AskNode, kind: type, timeout_s: float) -> NodeAnswered:
        return NodeAnswered(
            StackAnswer([WorkerStacks(id, stacks=[Stack("main", IMPORTS)]) for id in asked.question.ids])
        )

    progress = GroupProgress(types.SimpleNamespace(status=status, ask=ask), enabled=True)
    yield progress
    progress.close()


async def test_late_workers_are_described(shown):
    shown.add(group("actor", "running", "starting", "running", up=1))
    assert await shown._look(False) == Facts("1 of 3 workers of actor up")
    late = "actor:1 on gpu-1 waits for its interpreter, which first imports numpy, actor:2 on gpu-2 imports torch"
    assert await shown._look(True) == Facts("1 of 3 workers of actor up", late)


async def test_a_launch_that_waits_at_the_head_is_told_from_workers_that_start(shown):
    shown.add(group("arms"))
    assert (await shown._look(True)).missing == "the head has not launched arms"


async def test_the_line_is_over_when_the_hosts_of_a_channel_are_up(shown):
    hosts = group("channel@frames", "starting")  # a Promise of its own: no call of the driver gets its error
    shown.add(hosts)
    showing = shown._task
    hosts.ready.resolve(None)
    with pytest.raises(asyncio.CancelledError):
        await showing


async def test_groups_that_end_are_shown_until_they_have_ended(shown):
    one = group("actor", "gone", "gone", "running", up=3)
    one.ready.resolve(None)
    one.closing = True
    shown.add(one)
    found = await shown._look(True)
    assert found == Facts("2 of 3 workers of actor ended", "actor:2 on gpu-2 still runs")
    one.gone.resolve(None)
    assert await shown._look(True) is None


async def test_nothing_is_shown_to_a_driver_that_goes_on_nor_of_groups_of_the_library(shown, monkeypatch):
    shown.add(group("code@a", "starting"))
    assert shown._task is None
    shown.add(group("actor", "starting"))
    monkeypatch.setattr(group_progress, "all_waits", list)
    assert await shown._look(True) is None
