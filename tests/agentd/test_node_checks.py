"""The facts and path tests of a node: real threads and sockets, without a head."""

from __future__ import annotations

import asyncio
import logging
import os
from types import SimpleNamespace

import pytest

from agentd import node_checks
from agentd.log_reader import LogReader
from agentd.node_checks import NodeChecks
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.diagnosis.recent_log import MOST_LINES, RecentLog
from rlinf_actors.wire.check_values import CheckAnswer, CheckQuestion, PathAnswer, PathTest
from rlinf_actors.wire.values import HardwareReport, ResourceReport


class Node:
    def __init__(self, place) -> None:
        loop = asyncio.get_running_loop()
        rules = SimpleNamespace(log_dir=str(place), cgroups=Roots(why={"cgroup": "c"}))
        hardware = [ResourceReport("Franka", [HardwareReport("Franka", "Panda")])]
        site = SimpleNamespace(
            run_dir=place, rules=rules, resources=hardware, environment=dict, users=SimpleNamespace(all=list)
        )
        key = SimpleNamespace(interpreter="/job/python", user="", preload=("torch",))
        paths = (str(place / "site-packages"),)
        ready = SimpleNamespace(ready=True, key=key, paths=paths, user=None)
        templates = SimpleNamespace(running=[ready, SimpleNamespace(ready=False)])
        self.checks = NodeChecks(loop, site, {}, templates, LogReader(loop, site, {}))
        self.answers: asyncio.Queue[CheckAnswer] = asyncio.Queue()

    async def ask(self, **question) -> CheckAnswer:
        self.checks.ask(CheckQuestion(**question), self.answers.put_nowait)
        return await self.answers.get()

    async def step(self, *test, **fields) -> PathAnswer:
        answer = (await self.ask(path=PathTest(*test, **fields))).path
        assert answer is not None
        return answer


@pytest.fixture
async def node(tmp_path):
    found = Node(tmp_path)
    yield found
    found.checks.close()
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_facts_have_logs_packages_and_what_is_missing(node, tmp_path):
    (tmp_path / "site-packages" / "torch-2.9.dist-info").mkdir(parents=True)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "g-0.out").write_bytes(b"x" * 1000)
    (tmp_path / "job" / "g-1.out").write_bytes(b"x" * 500)
    os.utime(tmp_path / "job" / "g-1.out", (1, 1))
    facts = (await node.ask(facts=True)).facts
    assert [(one.path, one.packages["torch"]) for one in facts.interpreters[1:]] == [("/job/python", "2.9")]
    assert (facts.logs.size, facts.logs.last_hour, facts.logs.files) == (1500, 1000, 2)
    assert facts.logs.disk.total_bytes > facts.logs.disk.free_bytes > 0
    assert facts.cgroup_why == {"cgroup": "c"}
    assert (facts.robots, facts.accelerators) == (1, 0)
    assert facts.faults == []


async def test_the_last_lines_of_the_log_are_sent(node, monkeypatch):
    assert (await node.ask(log=True)).log == []
    kept = RecentLog()
    logging.getLogger().addHandler(kept)
    try:
        for number in range(2 * MOST_LINES):
            logging.getLogger("agentd.x").warning("line %d %s", number, "x" * 2000)
        lines = (await node.ask(log=True)).log
    finally:
        logging.getLogger().removeHandler(kept)
    assert len(lines) == MOST_LINES
    assert "WARNING agentd.x: line 999 xxx" in lines[-1]
    assert len(lines[-1]) == 1000


async def test_the_time_needs_no_facts(node):
    answer = await node.ask()
    assert answer.at > 1e9
    assert (answer.facts, answer.path) == (None, None)


async def test_a_path_is_measured_between_a_listener_and_a_near_end(node):
    listening = await node.step("listen", "127.0.0.1", size=1 << 20, limit_s=10.0)
    test = {"port": listening.port, "secret": listening.secret, "size": 1 << 20, "limit_s": 10.0}
    answer = await node.step("measure", "127.0.0.1", **test)
    assert (answer.there.size, answer.back.size, answer.fault) == (1 << 20, 1 << 20, "")
    assert (await node.step("measure", "127.0.0.1", **test)).kind == "refused"  # one test, then it is closed


async def test_a_question_whether_it_heard_anything_ends_a_listener(node):
    listening = await node.step("listen", "127.0.0.1")
    assert not (await node.step("heard", port=listening.port)).heard
    assert not (await node.step("heard", port=1)).heard
    assert (await node.step("measure", "127.0.0.1", port=listening.port)).kind == "refused"


async def test_a_node_takes_part_in_few_tests_at_a_time(node, monkeypatch):
    monkeypatch.setattr(node_checks, "MOST_TESTS", 1)
    assert (await node.step("listen", "127.0.0.1")).fault == ""
    assert "1 tests of paths already" in (await node.step("listen", "127.0.0.1")).fault


async def test_an_address_of_another_machine_is_a_fault(node):
    assert "cannot listen at 192.0.2.1" in (await node.step("listen", "192.0.2.1")).fault
