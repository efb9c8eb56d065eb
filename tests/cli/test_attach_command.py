"""`rlinf-actors attach`: the debugger of a real worker, in a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from cli_kit import example_status
from msgspec.structs import replace
from terminal import terminal

from rlinf_actors import NodePlacementStrategy, Worker, WorkerDiedError, WorkerError
from rlinf_actors.cli import app
from rlinf_actors.security.keyfile import who


class Walker(Worker):
    """Stops in its methods. Each of them returns what the debugger may change."""

    def step(self, value: int) -> int:
        result = value + 1
        breakpoint()
        result *= 10
        return result

    def divide(self) -> str:
        try:
            return str(1 / 0)
        except ZeroDivisionError as error:
            breakpoint()
            return str(error)

    @Worker.concurrent(2)
    def beside(self, value: int) -> int:
        breakpoint()
        return value

    def pid(self) -> int:
        return os.getpid()


class Sleeper(Worker):
    async def step(self, value: int) -> int:
        breakpoint()
        await asyncio.sleep(0)
        return value + 1


@pytest.fixture
def local(local_cluster, monkeypatch):
    made = local_cluster(num_nodes=1)
    for name, value in made.driver_env.items():
        monkeypatch.setenv(name, value)
    return made


def launch(cluster, cls=Walker, name="env", **more):
    return cls.create_group().launch(cluster, NodePlacementStrategy([0]), name=name, **more)


def attach(*arguments: str, typed: str) -> tuple[int, str, str]:
    """Run the command with input from a pipe; return its exit code, stdout and stderr."""
    command = [sys.executable, "-m", "rlinf_actors.cli.main", "attach", *arguments]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.live
def test_commands_from_a_pipe_look_into_a_worker_and_let_it_go_on(local, capsys, caplog):
    caplog.set_level(logging.WARNING, "rlinf_actors")
    with local.cluster(namespace="cell") as cluster:
        group = launch(cluster)
        assert group.pid().wait()
        code, _, err = attach("env:0", typed="c\n")
        assert (code, "env:0 waits in no breakpoint" in err) == (1, True)
        result = group.step(1)
        code, out, err = attach("env:0", "--wait", typed="p value, result\nresult = 5\nn\nn\np result\nc\n")
        assert code == 0, err
        assert "env:0 waits in a breakpoint at test_attach_command.py:" in err
        assert "env:0 goes on" in err
        assert "-> return result" in out
        assert "(Pdb) (1, 2)\n" in out
        assert "(Pdb) 50\n" in out
        assert result.wait() == [50]
        result = group.divide()
        while not first_worker(capsys)["breakpoint"].endswith(" in divide"):  # else the step before may be seen below
            time.sleep(0.05)
        code, out, _ = attach("env:0", "--wait", typed="p repr(error)\nimport sys\np sys.exc_info()[0]\nc\n")
        assert code == 0
        assert "ZeroDivisionError('division by zero')" in out
        assert "<class 'ZeroDivisionError'>" in out
        assert result.wait() == ["division by zero"]
        result = group.step(2)
        while not (place := first_worker(capsys)["breakpoint"]).endswith(" in step"):
            time.sleep(0.05)
        how = "rlinf-actors attach env:0 --job cell"  # as printed, also if another job has a group "env"
        while f" in step: {how}\n" not in caplog.text:
            time.sleep(0.05)
        assert app.run(["worker", "show", "env:0"]) == 0
        assert re.search(rf"at {re.escape(place)} for .*: {re.escape(how)}\n", capsys.readouterr().out)
        (row,) = (line for line in shown(capsys, "top").splitlines() if "env:0" in line)
        assert re.search(rf" breakpoint .*at {re.escape(place)} for .*: {re.escape(how)}", row)
        assert app.run(["stack", "env:0"]) == 0
        assert f"waits in breakpoint() at {place} ({how}) for " in capsys.readouterr().out
        code, _, err = attach(*how.split()[2:], typed="p 1\n")
        assert (code, "detached: env:0 waits on in its breakpoint" in err) == (0, True)
        assert attach("env:0", typed="q\n")[0] == 0
        with pytest.raises(WorkerError, match="BdbQuit"):
            result.wait()
        while first_worker(capsys)["breakpoint"]:
            time.sleep(0.05)
        kinds = ("breakpoint_reached", "breakpoint_attached", "breakpoint_left")
        events = [event for event in cluster.events(kinds=kinds) if place in event.text]
        assert {(event.kind, event.group, event.rank) for event in events} == {(kind, "env", 0) for kind in kinds}
        (reached,) = (event.text for event in events if event.kind == "breakpoint_reached")
        assert re.search(
            rf"waits in a breakpoint at {re.escape(place)}, for .* \(pid {os.getpid()} .*: {how}$", reached
        )
        assert who() in next(event.text for event in events if event.kind == "breakpoint_attached")


def shown(capsys, *verb: str) -> str:
    assert app.run(verb) == 0
    return capsys.readouterr().out


def first_worker(capsys) -> dict:
    assert app.run(["workers", "env", "--json"]) == 0
    return json.loads(capsys.readouterr().out)[0]


@pytest.mark.live
def test_terminal_detaches_and_is_told_of_the_workers_death(local):
    with local.cluster(namespace="cell") as cluster:
        group = launch(cluster)
        pid = group.pid().wait()[0]
        result = group.step(1)
        with terminal("attach", "env:0", "--wait") as first:
            first.until("(Pdb) ")
            first.type("p value + 41\n")
            first.until("42\n(Pdb) ")
            first.type("import time; print('on', flush=True); time.sleep(1000)\n")
            first.until("on\n")
            first.type("\x03")
            first.until("*** KeyboardInterrupt\n(Pdb) ")
            first.type("print('on', flush=True); exec('while 1: pass')\n")
            first.until("on\n")
            with terminal("attach", "env:0") as second:
                second.until("a command of the debugger has been running for ")
                second.type("\x03")
                second.until("*** KeyboardInterrupt\n(Pdb) ")
                second.type("\x03")
                assert second.end() == 130
            assert "42" not in second.shown, "it says nothing of what the first attachment was told"
            assert first.end() == 1
        with terminal("attach", "env:0") as last:
            last.until("(Pdb) ")
            last.type("\x04")
            assert last.end() == 0
        assert "detached: env:0 waits on" in last.shown
        with terminal("attach", "env:0") as last:
            last.until("(Pdb) ")
            os.kill(pid, signal.SIGKILL)
            assert last.end() == 1
        assert "on node node0 was ended by signal 9 (SIGKILL)" in last.shown
        with pytest.raises(WorkerDiedError):
            result.wait()


@pytest.mark.live
def test_later_attachment_takes_over(local):
    with local.cluster(namespace="cell") as cluster:
        result = launch(cluster).step(1)  # the worker may be starting yet
        with terminal("attach", "env:0", "--wait") as first:
            first.until("(Pdb) ")
            assert attach("env:0", typed="result = 3\nc\n")[0] == 0
            assert first.end() == 1
        assert "has attached to env:0 meanwhile: this attachment is over" in first.shown
        assert result.wait() == [30]


@pytest.mark.live
@pytest.mark.slow  # tests/worker/test_debugger.py has the short forms
def test_threads_and_event_loops_stop_too_and_a_shutdown_ends_them(local):
    with local.cluster(namespace="cell") as cluster:
        walker, sleeper = launch(cluster), launch(cluster, Sleeper, "loop")
        results = [walker.beside(1), walker.beside(2)]
        assert walker.pid().wait(), "other threads go on"
        for _ in results:
            code, out, _ = attach("env:0", "--wait", typed="p value\nc\n")
            assert (code, "return value" in out) == (0, True)
        assert [result.wait() for result in results] == [[1], [2]]
        result = sleeper.step(1)
        code, out, _ = attach("loop:0", "--wait", typed="n\nvalue = 4\nn\nn\nn\n")
        assert (code, "step() has ended" in out) == (0, True)
        assert result.wait() == [5]
        walker.step(1)
        with terminal("attach", "env:0", "--wait") as waiting:
            waiting.until("(Pdb) ")
            walker.shutdown()
            assert waiting.end() == 1
        assert "on node node0 was stopped" in waiting.shown


@pytest.mark.live
def test_pythonbreakpoint_of_the_driver_reaches_its_workers(local, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    with local.cluster(namespace="cell") as cluster:
        assert launch(cluster).step(1).wait() == [20]


@pytest.mark.parametrize("target", ["greeters", "greeters:x", "nobody:0", "greeters:1"])
def test_a_worker_that_does_not_run_is_a_usage_error(shown, target):
    assert shown("attach", target, status=replace(example_status()))[0] == 64
