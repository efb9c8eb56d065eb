"""One cluster whose processes are killed again and again while a driver has work under way."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kills_driver import CALLERS, RANKS, Outcome
from kills_workers import Loaded

from rlinf_actors import NodePlacementStrategy, procfs
from rlinf_actors.testing import LocalCluster

VICTIMS = ("worker", "template", "agentd", "head", "driver")
"""Worker: rank 0. Template: the one that both ranks came from. agentd: their node's. Head: node 0's agentd."""
NODES = 3
WAITS = CALLERS + 1
"""Waits of one rank, including the stream."""
PATIENCE_S = 30.0
"""Seconds after which an end or an answer counts as hanging."""
DIED = {"WorkerDiedError 9"}
ORPHANED = {"WorkerDiedError 9", "WorkerDiedError None"}
"""The kernel kills workers that lost their template; some notice the loss a moment earlier and exit."""
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent


class Driver:
    """The process of kills_driver, and its output.

    Args:
        command: its command line.
        env: its environment.
        words: a file for its stderr, shown if the driver ends too early.
    """

    def __init__(self, command: Sequence[Any], env: Mapping[str, str], words: Path) -> None:
        self._words = words
        with words.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0, env=env,
                start_new_session=True,
            )  # fmt: skip
        self._unread = b""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def line(self) -> Any:
        """Wait for its next line."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            assert _ready(self._process.stdout.fileno()), f"the driver says nothing for {PATIENCE_S} s"
            got = self._process.stdout.read(65536)
            assert got, self._end()
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def finish(self) -> None:
        """Ask the driver to end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"finish\n")
        except BrokenPipeError:
            raise AssertionError(self._end()) from None

    def end(self) -> list[str]:
        """Wait for its end; return what was wrong with the end, with its stderr."""
        return [self._end()] if self._process.wait(PATIENCE_S) else []

    def _end(self) -> str:
        return f"the driver ended with {self._process.wait(PATIENCE_S)}:\n{self._words.read_text(errors='replace')}"

    def close(self) -> None:
        """Kill the driver and close its pipes."""
        self._process.kill()
        with self._process:
            pass


class Scene:
    """Three nodes, the head on the first, and a group of this process's own on the last, which must live on.

    Args:
        local: the cluster, started.
        bystanders: that group; all its methods answer.
        folder: for the output of drivers.
    """

    def __init__(self, local: LocalCluster, bystanders: Any, folder: Path) -> None:
        self._local = local
        self._folder = folder
        self._bystanders = bystanders
        self._pids = bystanders.about().wait(PATIENCE_S)

    def round(self, victims: Sequence[str], rng: random.Random) -> list[str]:
        """Kill *victims* while a new driver has work under way; return the problems, a sentence each."""
        command = [sys.executable, _HERE / "kills_driver.py", self._local.head]
        paths = os.pathsep.join([str(_ROOT), str(_HERE)])
        with ExitStack() as stack:
            env = {**os.environ, **self._local.driver_env, "PYTHONPATH": paths}
            driver = Driver(command, env, self._folder / "driver.err")
            stack.callback(driver.close)
            pids = driver.line()
            watched = {pid: os.pidfd_open(pid) for worker, _, child in pids for pid in (worker, child)}
            stack.callback(lambda: [os.close(pidfd) for pidfd in watched.values()])
            for _ in range(rng.randrange(1, 5)):
                assert driver.line() == "progress"
            for victim in rng.sample(victims, len(victims)):
                self._kill(victim, pids[0][0], pids[0][1], driver)
            for name, rank in (("head", 0), ("agentd", 1)):
                if name in victims:
                    self._local.restart_agent(rank)
            found = [] if "driver" in victims else self._finish(driver, victims)
            found += [f"process {pid} is still there" for pid, fd in watched.items() if not _ready(fd)]
        return found + self._bystanders_live()

    def _kill(self, victim: str, worker: int, template: int, driver: Driver) -> None:
        if victim == "head":
            self._local.kill_agent(0)
        elif victim == "agentd":
            self._local.kill_agent(1)
        else:
            pid = {"worker": worker, "template": template, "driver": driver.pid}[victim]
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                assert len(victims_of(worker, template)) < 2, f"{victim} had ended before it was killed"

    def _finish(self, driver: Driver, victims: Sequence[str]) -> list[str]:
        """Let the driver end; return the problems with the ends of its calls."""
        to_fail = sum(WAITS for rank in range(RANKS) if expected(rank, victims))
        while to_fail:
            to_fail -= driver.line() == "failed"
        driver.finish()
        while not isinstance(said := driver.line(), list):
            pass
        found = driver.end()
        for rank, outcome in enumerate(said):
            found += [f"rank {rank}: {problem}" for problem in problems(Outcome(**outcome), expected(rank, victims))]
        return found

    def _bystanders_live(self) -> list[str]:
        now = self._bystanders.about().wait(PATIENCE_S)
        return [] if now == self._pids else [f"the bystanders were {self._pids}, and are {now}"]


def victims_of(*pids: int) -> list[int]:
    """The victims that run."""
    return [pid for pid in pids if (stat := procfs.stat(pid)) is not None and not stat.ended]


def expected(rank: int, victims: Sequence[str]) -> set[str]:
    """The errors with which waits for this rank may fail; none if all must be answered."""
    if "template" in victims:
        return ORPHANED
    return DIED if "worker" in victims and rank == 0 else set()


def problems(outcome: Outcome, allowed: set[str]) -> list[str]:
    """The problems with the ends of one rank's waits."""
    found = []
    waits = WAITS if allowed else 0
    if sum(outcome.failures.values()) != waits:
        found.append(f"{waits} waits were to fail, and these did: {outcome.failures} {outcome.texts}")
    elif not set(outcome.failures) <= allowed:
        found.append(f"{outcome.failures} instead of {allowed}: {outcome.texts}")
    if outcome.answered + (CALLERS if allowed else 0) != outcome.made:
        found.append(f"{outcome.made} calls were made and {outcome.answered} answered")
    if not allowed and (outcome.executed, outcome.doubled) != (outcome.made, 0):
        found.append(f"{outcome.made} calls were made, {outcome.executed} executed, {outcome.doubled} more than once")
    return found


def _ready(fd: int) -> bool:
    return bool(select.select([fd], [], [], PATIENCE_S)[0])


def start_bystanders(cluster: Any) -> Any:
    """Launch two workers on a node where no process is killed."""
    return Loaded.create_group().launch(cluster, NodePlacementStrategy([2, 2]), name="bystanders")


assert RANKS == 2
