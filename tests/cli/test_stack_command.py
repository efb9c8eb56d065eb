"""`rlinf-actors stack`: cycles of waits, equal stacks together, and a deadlock of real workers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal

import pace
import pytest
from cli_kit import example_status
from msgspec.structs import replace
from terminal import terminal

from rlinf_actors import Channel, NodePlacementStrategy, Worker, WorkerGroup
from rlinf_actors.cli import app, stack_command
from rlinf_actors.cli.stack_command import select
from rlinf_actors.cli.stack_report import ShownWorker, collectives, cycles, report_dict, report_lines
from rlinf_actors.errors import CallTimeoutError, UsageError
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.wire.stack_values import Stack, StackFrame, Wait, WorkerStacks
from rlinf_actors.wire.values import GroupState, WorkerState


def worker(rank: int, *on: int, job: str = "j", blocks: bool = True, limit_s: float = 0.0, **more) -> ShownWorker:
    waits = [Wait(f"recv() from env:{to}", 312.0, [f"env:{to}"], "MainThread", blocks, limit_s) for to in on]
    stacks = [Stack("MainThread", [StackFrame("/u/train.py", 12, "Env.step")])]
    answer = WorkerStacks(f"{job}-{rank}", "step", 312.0, waits=waits, stacks=stacks)
    return ShownWorker(job, "env", rank, "gpu-1", replace(answer, **more))


def waiting_in(run: str) -> list[StackFrame]:
    """The frames of a wait, in files of the directory *run*."""
    return [
        StackFrame(f"{run}/u/train.py", 12, "Env.step"),
        StackFrame(f"{run}/x/rlinf_actors/runtime/future.py", len(run), "wait"),
        StackFrame(f"{run}/x/rlinf_actors/net/reading.py", 2, "wait"),
        StackFrame("/usr/lib/python3.11/selectors.py", 3, "select"),
    ]


def rings(*workers: ShownWorker) -> list[tuple[bool, list[str]]]:
    return [(one.deadlock, [step.worker for step in one.steps]) for one in cycles(workers)]


# --- cycles ---


def test_workers_that_wait_for_one_another_are_a_deadlock():
    assert rings(worker(0, 1), worker(1, 0)) == [(True, ["env:0", "env:1"])]
    assert rings(*(worker(n, (n + 1) % 8) for n in range(8))) == [(True, [f"env:{n}" for n in range(8)])]


def test_chains_of_waits_are_no_cycle():
    assert rings(worker(0, 1), worker(1, 2), worker(2)) == []
    assert rings(worker(0, 5)) == []  # of a worker that was not asked


def test_who_only_waits_for_a_deadlock_is_not_in_it():
    assert rings(worker(0, 1), worker(1, 2), worker(2, 1), worker(3, 0, 1)) == [(True, ["env:1", "env:2"])]


def test_a_wait_that_can_end_by_itself_or_beside_other_calls_is_no_deadlock():
    assert rings(worker(0, 1), worker(1, 0, limit_s=5.0)) == [(False, ["env:0", "env:1"])]
    assert rings(worker(0, 1), worker(1, 0, blocks=False)) == [(False, ["env:0", "env:1"])]


def test_each_cycle_is_named_once_and_deadlocks_first():
    loose = [worker(4, 5, blocks=False), worker(5, 4)]
    assert rings(*loose, worker(0, 1), worker(1, 0), worker(2, 3), worker(3, 2)) == [
        (True, ["env:0", "env:1"]), (True, ["env:2", "env:3"]), (False, ["env:4", "env:5"]),
    ]  # fmt: skip


def test_workers_of_two_jobs_with_equal_names_are_not_mixed():
    assert rings(worker(0, 1), worker(1), worker(0, job="k"), worker(1, 0, job="k")) == []


def test_a_worker_that_waits_for_several_is_in_the_cycle_of_one_of_them():
    assert rings(worker(0, 2, 1), worker(1, 0), worker(2)) == [(True, ["env:0", "env:1"])]


# --- the report ---


def test_equal_stacks_are_shown_once_with_all_ranks():
    workers = [worker(n, n + 10, stacks=[Stack("MainThread", waiting_in(f"/run{n}"))]) for n in (0, 1, 2, 5)]
    text = "\n".join(report_lines(workers))
    assert text.count("/u/train.py:12 in Env.step") == 1
    assert "Env.step\n    … 3 frames of rlinf_actors\n" in text
    assert "/run5/x/rlinf_actors/net/reading.py:2 in wait\n" in "\n".join(report_lines(workers[3:], all_frames=True))
    assert "env:0-2, 5 of job j, on gpu-1: in step() for 5 min" in text
    assert "env:5 waits in recv() from env:15 for 5 min" in text


def test_a_worker_without_an_answer_is_named_with_the_reason():
    silent = [worker(n, fault="its I/O thread does not answer", stacks=[]) for n in (0, 1)]
    assert list(report_lines(silent))[:2] == [
        "env:0-1 of job j, on gpu-1: no answer: its I/O thread does not answer",
        "  --signal and --py-spy show stacks of workers that do not answer",
    ]


def test_each_answer_says_how_its_stacks_were_taken():
    shown = [worker(0), worker(1, level="signal"), worker(2, level="py-spy"), worker(3, level="native")]
    text = "\n".join(report_lines(shown))
    for rank, level in enumerate(["its I/O thread", "a signal", "py-spy", "py-spy, with C code"]):
        assert f"env:{rank} of job j, on gpu-1: " in text
        assert f"stacks by {level}" in text
    assert [one["level"] for one in report_dict(shown)["workers"]] == ["io-thread", "signal", "py-spy", "native"]


def test_frames_that_lead_to_the_method_are_left_out_of_the_text_only():
    frames = [
        StackFrame("/x/rlinf_actors/template/bootstrap.py", 1, "main"),
        StackFrame("/x/rlinf_actors/worker/executors.py", 2, "SerialExecutor.serve"),
        StackFrame("/x/rlinf_actors/worker/invocation.py", 3, "Invocation.run"),
        StackFrame("/u/train.py", 4, "Env.step"),
    ]
    shown = [worker(0, stacks=[Stack("MainThread", frames)])]
    text = "\n".join(report_lines(shown))
    assert "/u/train.py:4 in Env.step" in text
    assert "rlinf_actors" not in text
    (found,) = report_dict(shown)["workers"]
    assert [frame["line"] for frame in found["stacks"][0]["frames"]] == [1, 2, 3, 4]


def test_tasks_are_indented_beneath_those_that_await_them():
    frames = [StackFrame("/u/train.py", 12, "work")]
    stacks = [
        Stack("main", frames, True, depth=0, awaits="gather() of 3"),
        Stack("a", frames, True, count=2, depth=1),
        Stack("b", frames, True, depth=1, awaits="recv() from env:1"),
        Stack("other", frames, True, awaits="a future"),
    ]
    tasks = list(report_lines([worker(0, stacks=stacks)]))[1:-1]
    assert tasks == [
        "  task main:",
        "    /u/train.py:12 in work",
        "    awaits gather() of 3",
        "      task a and 1 more:",
        "        /u/train.py:12 in work",
        "      task b:",
        "        /u/train.py:12 in work",
        "        awaits recv() from env:1",
        "  task other:",
        "    /u/train.py:12 in work",
        "    awaits a future",
    ]
    stacks[2] = replace(stacks[2], awaits="recv() from env:0")
    lines = list(
        report_lines(
            [
                worker(0, stacks=stacks),
                worker(1, stacks=[*stacks[:2], replace(stacks[2], awaits="recv() from env:2"), stacks[3]]),
            ]
        )
    )
    assert sum("task main:" in line for line in lines) == 1, "ranks that differ only in whom they wait for are alike"
    assert not any("recv()" in line for line in lines)


def test_json_has_cycles_and_workers_with_plain_values():
    found = json.loads(json.dumps(report_dict([worker(0, 1), worker(1, 0)])))
    (cycle,) = found["cycles"]
    assert (cycle["job"], cycle["deadlock"]) == ("j", True)
    step = {"worker": "env:0", "waits_for": "env:1", "what": "recv() from env:1", "seconds": 312.0}
    assert cycle["steps"][0] == step
    assert [(one["group"], one["rank"], one["method"]) for one in found["workers"]] == [
        ("env", 0, "step"), ("env", 1, "step"),
    ]  # fmt: skip


# --- collectives ---

SITE = "/venv/lib/python3.11/site-packages/torch/distributed"


def in_collective(rank: int, name: str = "all_reduce", line: int = 88) -> ShownWorker:
    frames = [
        StackFrame("/x/rlinf_actors/worker/executors.py", 2, "SerialExecutor.serve"),
        StackFrame("/x/rlinf_actors/worker/invocation.py", 3, "Invocation.run"),
        StackFrame("/u/train.py", line, "Actor.sync"),
        StackFrame(f"{SITE}/c10d_logger.py", 81, "_exception_logger.<locals>.wrapper"),
        StackFrame(f"{SITE}/distributed_c10d.py", 2810, name),
        StackFrame(f"{SITE}/distributed_c10d.py", 10, "_wait"),
    ]
    return worker(rank, waits=[], stacks=[Stack("MainThread", frames)])


def test_ranks_that_are_missing_in_a_collective_are_named_with_what_they_do():
    shown = [*map(in_collective, range(5)), worker(5), worker(6, 0), worker(7, method="", stacks=[])]
    text = "\n".join(report_lines(shown))
    assert text.startswith(
        "ranks of group env of job j are not in the same collective:\n"
        "  env:0-4 in all_reduce() at /u/train.py:88 in Actor.sync\n"
        "  env:5 in step() for 5 min at /u/train.py:12 in Env.step\n"
        "  env:6 waits in recv() from env:0 for 5 min\n"
        "  env:7 runs no call\n"
    )
    (found,) = report_dict(shown)["collectives"]
    assert found["inside"] == [
        {"collective": "all_reduce", "place": "/u/train.py:88 in Actor.sync", "ranks": [0, 1, 2, 3, 4]}
    ]
    assert [one["rank"] for one in found["outside"]] == [5, 6, 7]


def test_ranks_in_two_collectives_are_named_and_those_in_one_are_not():
    assert collectives([in_collective(0), in_collective(1, line=90)]) == []
    (found,) = collectives([in_collective(0), in_collective(1, "barrier")])
    assert {name for name, _ in found.inside} == {"all_reduce", "barrier"}
    assert found.outside == {}
    assert collectives([worker(0), worker(1)]) == []


def test_stacks_from_outside_show_collectives_too():
    shown = [replace_answer(in_collective(0), level="py-spy"), worker(1, level="py-spy", method="", fault="gone")]
    assert "env:1 gives no answer: gone" in "\n".join(report_lines(shown))


def replace_answer(shown: ShownWorker, **more) -> ShownWorker:
    return shown._replace(answer=replace(shown.answer, **more))


# --- the command ---


def status_of_two_jobs():
    groups = [
        GroupState(
            job, "env", "m:C", "d", "running", [WorkerState(f"{job}-{n}", n, 0, "ip", "running") for n in (0, 1)]
        )
        for job in ("a", "b")
    ]
    return replace(example_status(), groups=groups)


def test_workers_are_chosen_by_group_rank_and_job():
    status = status_of_two_jobs()
    assert [worker.id for _, worker in select(status, "", "")] == ["a-0", "a-1", "b-0", "b-1"]
    assert [worker.id for _, worker in select(status, "", "b")] == ["b-0", "b-1"]
    assert [worker.id for _, worker in select(status, "env:1", "a")] == ["a-1"]


@pytest.mark.parametrize(
    ("target", "job", "text"),
    [
        ("env", "", "several jobs have a group 'env'"),
        ("nope", "", "there is no group 'nope'; there are: env of job a, env of job b; .*events --group nope`"),
        ("", "c", "there is no group of job 'c'"),
        ("env:7", "a", "group 'env' has no running rank '7'; there are: 0-1"),
    ],
)
def test_workers_that_are_not_there_are_refused_with_what_there_is(target, job, text):
    with pytest.raises(UsageError, match=text):
        select(status_of_two_jobs(), target, job)


@pytest.mark.parametrize("arguments", [[], ["env", "--all"]])
def test_the_command_asks_for_exactly_one_choice(shown, arguments):
    code, _, err = shown("stack", *arguments, status=status_of_two_jobs())
    assert (code, "GROUP:RANK" in err) == (64, True)


def test_text_of_hostile_workers_is_shown_harmless(shown, monkeypatch):
    evil = "a\x1b[2J\r\n\x9b1m\u202e"
    stacks = [Stack(evil, [StackFrame(evil, 1, evil)])]
    waits = [Wait(evil, 1.0, [evil], evil)]
    answers = [worker(0, method=evil, stacks=stacks, waits=waits), worker(1, fault=evil)]

    async def ask(*_given):
        return answers

    monkeypatch.setattr(stack_command, "_ask", ask)
    for more in ([], ["--json"]):
        code, out, _ = shown("stack", "--all", *more, status=status_of_two_jobs())
        assert code == 0
        assert not {"\x1b", "\x9b", "\r", "\u202e"} & set(out)


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_stacks_from_outside_that_are_not_taken_fail_the_command_with_the_fix(shown, monkeypatch, as_json):
    fix = "its node has no py-spy: run 'pip install py-spy' there"
    answers = [worker(0), worker(1, level="py-spy", fault=fix)]

    async def ask(*_given):
        return answers

    monkeypatch.setattr(stack_command, "_ask", ask)
    code, out, err = shown("stack", "--all", "--py-spy", *as_json, status=status_of_two_jobs())
    assert (code, fix in out) == (1, True)
    assert err == f"error: 1 of 2 workers gave no stacks: env:1 on gpu-1: {fix}\n"
    code, _, err = shown("stack", "--all", *as_json, status=status_of_two_jobs())
    assert (code, err) == (0, ""), "that a worker does not answer is what was asked"


# --- real workers ---

RANKS = 8


class Ring(Worker):
    """Each rank receives from the next, and no rank sends."""

    def wait_for_next(self, about_to_wait: Channel) -> None:
        about_to_wait.put(self._rank)
        self.recv(self._group_name, (self._rank + 1) % self._world_size)


class Reader(Worker):
    async def read(self, channel: Channel) -> None:
        await channel.get(key="empty", async_op=True)


class Caller(Worker):
    def pid(self) -> int:
        return os.getpid()

    def call(self, other: WorkerGroup, begun: Channel) -> None:
        begun.put(self._group_name)
        begun.get(key=self._group_name)
        other.pid().wait()

    def hold_the_lock(self, begun: Channel) -> None:
        """C code keeps the interpreter's lock, so that no other thread runs."""
        begun.put("holds")
        begun.get(key="holds")
        while True:  # a signal ends a pause
            ctypes.PyDLL(None).pause()


@pytest.mark.live
def test_workers_that_call_one_another_and_a_stopped_one_are_named(local_cluster, monkeypatch, capsys):
    local = local_cluster(num_nodes=1)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)

    def ask() -> dict:
        assert app.run(["stack", "--job", "cell", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    with local.cluster(namespace="cell") as cluster:
        channel = Channel.create("begun")
        place = NodePlacementStrategy([0])
        left, right = (Caller.create_group().launch(cluster, place, name=name) for name in ("left", "right"))
        (pid,) = left.pid().wait()
        calls = [left.call(right, channel), right.call(left, channel)]
        assert {channel.get(), channel.get()} == {"left", "right"}
        for name in ("left", "right"):  # both run call() now
            channel.put(0, key=name)

        def named() -> list:
            return [[(one["worker"], one["what"]) for one in cycle["steps"]] for cycle in ask()["cycles"]]

        deadlock = [[("left:0", "pid() of right:0"), ("right:0", "pid() of left:0")]]
        assert pace.again_like(named, deadlock) == deadlock
        os.kill(pid, signal.SIGSTOP)
        try:
            faults = {one["group"]: one["fault"] for one in ask()["workers"]}
        finally:
            os.kill(pid, signal.SIGCONT)
        stopped = f"its process is stopped (state T): `kill -CONT {pid}` on its node lets it go on"
        assert faults == {"channel@begun": "", "left": stopped, "right": ""}
        for call in calls:
            call.cancel()

        stuck = Caller.create_group().launch(cluster, place, name="stuck")
        lost = stuck.hold_the_lock(channel)
        assert channel.get() == "holds"
        channel.put(0, key="holds")

        def stacks(*level: str) -> tuple[str, str, bool]:
            code = app.run(["stack", "stuck", "--json", *level])
            (found,) = json.loads(capsys.readouterr().out)["workers"]
            assert code == bool(level and found["fault"])
            functions = [frame["function"] for stack in found["stacks"] for frame in stack["frames"]]
            held = any(one.rpartition(".")[2] == "hold_the_lock" for one in functions)
            return found["level"], found["fault"], held

        silent = ("io-thread", "its I/O thread does not answer", False)
        assert pace.again_like(stacks, silent) == silent
        assert stacks("--signal") == ("signal", "", True)
        level, fault, held = stacks("--py-spy")
        assert (level, held or "py-spy" in fault) == ("py-spy", True)  # not installed, or forbidden here
        lost.cancel()


class Locker(Worker):
    def hold(self, begun: Channel) -> None:
        with self.device_lock:
            begun.put(0)
            self.recv(self._group_name, 1)

    def want(self) -> None:
        with self.device_lock:
            pass


@pytest.mark.live
def test_a_deadlock_over_a_device_lock_is_named_on_a_terminal(local_cluster, monkeypatch, capsys):
    local = local_cluster(num_nodes=1, hardware={"accelerators": 1, "model": "A800"})
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="cell") as cluster:
        channel = Channel.create("begun")
        lockers = Locker.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="lockers")
        lost = [lockers.execute_on(0).hold(channel)]
        channel.get()
        lost.append(lockers.execute_on(1).want())

        def named() -> bool:
            assert app.run(["stack", "lockers"]) == 0
            return capsys.readouterr().out.startswith("deadlock in job cell:\n")

        assert pace.again_like(named, True)
        with terminal("stack", "lockers") as shown:
            assert shown.end() == 0
        assert "lockers:0 waits in recv() from lockers:1 (" in shown.shown
        assert "lockers:1 waits in device_lock, held by lockers:0 (job 'cell'), owned by " in shown.shown
        for option, how in (("--signal", "a signal"), ("--py-spy", "py-spy")):
            with terminal("stack", "lockers:0", option) as shown:
                assert shown.end() == (f"stacks by {how}" not in shown.shown)
            assert f"stacks by {how}" in shown.shown or "py-spy" in shown.shown
        with terminal("stack", "--all", "--json") as shown:
            assert shown.end() == 0
        assert '"deadlock": true' in shown.shown
        for call in lost:
            call.cancel()


class Reducer(Worker):
    def join(self, port: int) -> None:
        import torch.distributed as dist

        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=where, rank=self._rank, world_size=self._world_size)

    def reduce(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))

    def read(self, channel: Channel) -> None:
        channel.get(key="nothing")


@pytest.mark.live
@pytest.mark.slow  # the tests of the report are its short form
def test_rank_that_is_missing_in_a_collective_is_named(local_cluster, monkeypatch, capsys):
    pytest.importorskip("torch")
    local = local_cluster(num_nodes=1)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="cell") as cluster, contextlib.closing(HeldPorts()) as ports:
        channel = Channel.create("empty")
        group = Reducer.create_group().launch(cluster, NodePlacementStrategy([0, 0, 0]), name="actor")
        group.join(ports.hold()).wait()
        lost = [group.execute_on(0, 1).reduce(), group.execute_on(2).read(channel)]

        def lines() -> list[str]:
            assert app.run(["stack", "actor"]) == 0
            return [
                line.partition(" at ")[0].partition(" for ")[0] for line in capsys.readouterr().out.splitlines()[:3]
            ]

        uneven = [
            "ranks of group actor of job cell are not in the same collective:",
            "  actor:0-1 in all_reduce()",
            "  actor:2 waits in get() from channel 'empty'",
        ]
        assert pace.again_like(lines, uneven) == uneven
        for call in lost:
            call.cancel()


@pytest.mark.live
def test_a_deadlock_of_eight_ranks_is_named(local_cluster, monkeypatch, capsys, caplog, late_answers):
    local = local_cluster(num_nodes=1)
    monkeypatch.setenv("RLINF_ACTORS_WAIT_LINES", "0.2")
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)

    def ask(*arguments: str) -> str:
        assert app.run(["stack", *arguments]) == 0
        return capsys.readouterr().out

    with local.cluster(namespace="cell") as cluster:
        channel = Channel.create("waits")
        here = NodePlacementStrategy([0] * RANKS)
        ring = Ring.create_group().launch(cluster, here, name="ring")
        reader = Reader.create_group().launch(cluster, NodePlacementStrategy([0]), name="reader")
        lost = [ring.wait_for_next(channel), reader.read(channel)]
        assert sorted(channel.get() for _ in range(RANKS)) == list(range(RANKS))

        names = [f"ring:{rank}" for rank in range(RANKS)]
        steps = [(name, to, f"recv() from {to}") for name, to in zip(names, [*names[1:], names[0]], strict=True)]

        def named() -> list[list[tuple[str, str, str]]]:
            found = json.loads(ask("ring", "--json"))["cycles"]
            return [
                [(step["worker"], step["waits_for"], step["what"]) for step in cycle["steps"]]
                for cycle in found
                if cycle["deadlock"] and cycle["job"] == "cell"
            ]

        assert pace.again_like(named, [steps]) == [steps]
        text = ask("ring")
        assert text.startswith("deadlock in job cell:\n  ring:0 waits in recv() from ring:1 (")
        assert f"ring:0-{RANKS - 1} of job cell, on " in text
        assert text.count("in Ring.wait_for_next") == 1

        waits = "waits in get() from channel 'waits' for"
        assert pace.again_like(lambda: waits in ask("reader:0"), True)
        text = ask("--all")
        assert "reader:0 of job cell" in text
        assert "in read() for" in text

        deadlock = "deadlock: ring:0 waits in recv() from ring:1 ("
        with pytest.raises(CallTimeoutError, match=re.escape(deadlock)):
            lost[0].wait(0.7)
        lines = [record.getMessage() for record in caplog.records]
        start = rf"waiting for wait_for_next\(\) of ring:0-{RANKS - 1} for \d+ s: {re.escape(deadlock)}"
        assert any(re.match(start, line) for line in lines)
        with pytest.raises(CallTimeoutError, match=re.escape(deadlock)):
            channel.get(key="empty", timeout=1.0)
        for call in lost:
            call.cancel()
