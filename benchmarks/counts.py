"""Count what one operation costs in each process: ``python -m benchmarks.counts [--count N] [--json FILE]``.

Seconds drift with the machine and its load. These counts drift less: system calls (by strace), wake-ups of threads
(voluntary context switches) and the CPU time of each thread (by /proc). Wake-ups and CPU time are counted without
strace, which makes every system call slower. Each operation runs N times in each of ROUNDS rounds. The fewest of a
round are shown: heartbeats, and threads that are late on a busy machine, only add to them.

* wait, await, await_uvloop: a call of an empty method of one worker
* fan_out: such a call of 8 workers, by wait()
* round_trip: a small message from one worker to another by send() and recv(), and back
* item: 100 bytes through a channel, one at a time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rlinf_actors
from benchmarks.processes import descendants
from benchmarks.timing import new_uvloop

FAN_OUT = 8
ROUNDS = 3
WARM_UP = 100
ATTACH_S = 30.0
"""Seconds that strace gets to attach to a process."""


@dataclass
class Thread:
    """The CPU time (microseconds) and voluntary context switches of one thread in one operation."""

    cpu_us: float
    switches: float


@dataclass
class Process:
    """The costs of one operation in one process. `calls` has the number of system calls by name, {} without strace."""

    threads: dict[str, Thread] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)

    @property
    def system_calls(self) -> float:
        return sum(self.calls.values())

    @property
    def switches(self) -> float:
        return sum(thread.switches for thread in self.threads.values())


Counts = dict[str, Process]
"""Processes by their roles: caller, worker (or worker0, worker1, ...), host."""


class CountedWorker(rlinf_actors.Worker):
    def noop(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()

    def ping(self, count: int) -> None:
        for _ in range(count):
            self.send(b"x" * 100, self._group_name, 1)
            self.recv(self._group_name, 1)

    def pong(self, count: int) -> None:
        for _ in range(count):
            self.send(self.recv(self._group_name, 0), self._group_name, 0)

    def put(self, channel: Any, count: int) -> None:
        for _ in range(count):
            channel.put(b"x" * 100)

    def get(self, channel: Any, count: int) -> None:
        for _ in range(count):
            channel.get()


class Scene:
    """A private cluster with the workers of all operations. `processes` has the pids by role."""

    def __init__(self, cluster: rlinf_actors.Cluster) -> None:
        strategy = rlinf_actors.NodePlacementStrategy([0] * FAN_OUT)
        self._group: Any = CountedWorker.create_group().launch(cluster, strategy)
        pids = self._group.pid().wait()
        self._one = self._group.execute_on(0)
        before = set(descendants(os.getpid()))
        self._channel = rlinf_actors.Channel.create("counted")
        self._channel.put(0)
        self._channel.get()
        self.workers = {f"worker{rank}": pid for rank, pid in enumerate(pids)}
        hosts = sorted(set(descendants(os.getpid())) - before)
        self.host = {"host": hosts[-1]}

    def wait(self, count: int) -> None:
        for _ in range(count):
            self._one.noop().wait()

    def awaited(self, count: int) -> None:
        asyncio.run(self._await(count))

    def awaited_uvloop(self, count: int) -> None:
        loop = new_uvloop()
        assert loop is not None
        loop.run_until_complete(self._await(count))
        loop.close()

    async def _await(self, count: int) -> None:
        for _ in range(count):
            await self._one.noop()

    def fan_out(self, count: int) -> None:
        for _ in range(count):
            self._group.noop().wait()

    def round_trip(self, count: int) -> None:
        pong = self._group.execute_on(1).pong(count)
        self._one.ping(count).wait()
        pong.wait()

    def item(self, count: int) -> None:
        get = self._group.execute_on(1).get(self._channel, count)
        self._one.put(self._channel, count).wait()
        get.wait()

    def operations(self) -> dict[str, tuple[Callable[[int], None], dict[str, int]]]:
        """Return for each operation a function that runs it *count* times, and the pids of its processes by role."""
        caller = {"caller": os.getpid()}
        one = {"worker0": self.workers["worker0"]}
        two = {**one, "worker1": self.workers["worker1"]}
        found = {
            "wait": (self.wait, {**caller, **one}),
            "await": (self.awaited, {**caller, **one}),
            "await_uvloop": (self.awaited_uvloop, {**caller, **one}),
            "fan_out": (self.fan_out, {**caller, **one}),
            "round_trip": (self.round_trip, two),
            "item": (self.item, {**two, **self.host}),
        }
        if new_uvloop() is None:
            del found["await_uvloop"]
        return found


def measure(names: Sequence[str], count: int, traced: bool) -> dict[str, Counts]:
    """Run each operation of *names* *count* times, and with *traced* as often again under strace, in ROUNDS rounds."""
    with rlinf_actors.Cluster(num_nodes=1) as cluster:
        operations = Scene(cluster).operations()
        found = {}
        for name in names or operations:
            run, pids = operations[name]
            run(WARM_UP)
            found[name] = _counted(run, pids, count, traced)
    return found


def _counted(run: Callable[[int], None], pids: dict[str, int], count: int, traced: bool) -> Counts:
    rounds = [_count_switches(run, pids, count) for _ in range(ROUNDS)]
    counts = min(rounds, key=lambda counts: sum(process.switches for process in counts.values()))
    if traced:
        calls = [_count_calls(run, pids, count) for _ in range(ROUNDS)]
        fewest = min(calls, key=lambda calls: sum(sum(made.values()) for made in calls.values()))
        for role, made in fewest.items():
            counts[role].calls = made
    return counts


def _count_switches(run: Callable[[int], None], pids: dict[str, int], count: int) -> Counts:
    before = {role: _threads(pid) for role, pid in pids.items()}
    run(count)
    after = {role: _threads(pid) for role, pid in pids.items()}
    return {role: Process(_difference(before[role], after[role], count)) for role in pids}


def _count_calls(run: Callable[[int], None], pids: dict[str, int], count: int) -> dict[str, dict[str, float]]:
    with contextlib.ExitStack() as stack:
        # this process last: strace would trace the next strace too, which it starts
        last = sorted(pids, key=lambda role: pids[role] == os.getpid())
        files = {role: stack.enter_context(_strace(pids[role])) for role in last}
        run(count)
    return {role: {call: number / count for call, number in _summary(file).items()} for role, file in files.items()}


def _threads(pid: int) -> dict[int, tuple[str, float, int]]:
    """Return name, CPU time in microseconds and number of voluntary switches of each thread of a process."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            name = (folder / "comm").read_text().strip()
            cpu_us = int((folder / "schedstat").read_text().split()[0]) / 1e3
            switches = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (folder / "status").read_text(), re.M)
            assert switches
            name = "main" if int(folder.name) == pid else name if name.startswith("ZMQ") else "I/O"
            found[int(folder.name)] = (name, cpu_us, int(switches[1]))
    return found


def _difference(
    before: dict[int, tuple[str, float, int]], after: dict[int, tuple[str, float, int]], count: int
) -> dict[str, Thread]:
    found: dict[str, Thread] = {}
    for tid, (name, cpu_us, switches) in after.items():
        _, cpu_before, switches_before = before.get(tid, ("", 0.0, 0))
        thread = found.setdefault(name, Thread(0.0, 0.0))
        thread.cpu_us += (cpu_us - cpu_before) / count
        thread.switches += (switches - switches_before) / count
    return {name: thread for name, thread in found.items() if thread.cpu_us >= 0.1}


# --- strace ---


def why_no_strace() -> str:
    """Return why this process cannot count system calls by strace, "" if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    with tempfile.NamedTemporaryFile() as file, subprocess.Popen(["sleep", "60"]) as other:
        try:
            with _strace_to(other.pid, file.name):
                return ""
        except OSError as error:
            return str(error)
        finally:
            other.kill()


@contextlib.contextmanager
def _strace(pid: int) -> Iterator[Path]:
    """Count the system calls of all threads of a process in the block. Give the file that has the summary afterwards.

    The file is removed by `_summary`.
    """
    handle, name = tempfile.mkstemp(prefix="counts-")
    os.close(handle)
    with _strace_to(pid, name):
        yield Path(name)


@contextlib.contextmanager
def _strace_to(pid: int, file: str) -> Iterator[None]:
    command = ["strace", "-f", "-c", "-o", file, "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "LC_ALL": "C"}) as strace:
        assert strace.stderr is not None
        try:
            said = strace.stderr.readline()
            if "attached" not in said:
                raise OSError(f"strace cannot trace process {pid}: {said.strip()}")
            yield
        finally:
            strace.send_signal(signal.SIGINT)
            strace.stderr.read()


def _summary(file: Path) -> dict[str, int]:
    """Return the number of each system call in a summary of ``strace -c``, and remove the file."""
    rows = re.findall(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", file.read_text(), re.M)
    file.unlink()
    return {call: int(number) for number, call in rows if call != "total"}


# --- output ---


def text(found: dict[str, Counts]) -> str:
    """Return the counts as lines for people."""
    lines = []
    for name, counts in found.items():
        switches = sum(process.switches for process in counts.values())
        calls = sum(process.system_calls for process in counts.values())
        lines.append(f"{name}: {switches:.1f} wake-ups, {calls:.1f} system calls")
        for role, process in counts.items():
            most = sorted(process.calls.items(), key=lambda call: -call[1])
            listed = ", ".join(f"{call} {number:.1f}" for call, number in most if number >= 0.05)
            lines.append(f"  {role:8} {process.system_calls:5.1f} calls: {listed}")
            for thread, took in process.threads.items():
                lines.append(f"    {thread:12} {took.switches:5.2f} wake-ups  {took.cpu_us:7.1f} us of CPU")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=__doc__)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="all by default")
    parser.add_argument("--count", type=int, default=300, help="operations in a round (default 300)")
    parser.add_argument("--json", metavar="FILE", help="write the counts to it")
    options = parser.parse_args(arguments)
    missing = why_no_strace()
    if missing:
        print(f"benchmarks: no system calls are counted: {missing}", file=sys.stderr)
    found = measure(options.operations, options.count, not missing)
    print(text(found))
    if options.json:
        plain = {name: {role: asdict(process) for role, process in counts.items()} for name, counts in found.items()}
        Path(options.json).write_text(json.dumps(plain, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
