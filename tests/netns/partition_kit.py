"""A cluster whose nodes are network namespaces, with short leases; its drivers; and its event log as it is written."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import netns_kit
import pace

HERE = Path(__file__).resolve().parent
PATIENCE_S = 30.0
SHORT = pace.timers(beat_s=0.15, lease_s=3.0, robot_lease_s=1.0, head_grace_s=8.0)["timers"]
"""Long enough for a machine with other running tests."""


class Lines:
    """A process's standard output, a line at a time."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        self._read = b""

    def next(self, patience_s: float = PATIENCE_S) -> str:
        while b"\n" not in self._read:
            assert select.select([self._fd], [], [], patience_s)[0], "the process prints no line"
            got = os.read(self._fd, 1 << 16)
            assert got, "the process has ended"
            self._read += got
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()


class Failed(Exception):
    """An error in a driver; `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Driver(Lines):
    """A process of partition_driver.py."""

    def ask(self, line: str, patience_s: float = PATIENCE_S) -> Any:
        """Evaluate a line in the driver; return its value or raise Failed."""
        self.say(line)
        kind, value = json.loads(self.next(patience_s))
        if kind:
            raise Failed(kind, value)
        return value

    def fails(self, line: str, patience_s: float = PATIENCE_S) -> Failed:
        """Evaluate a line that must fail; return the failure."""
        try:
            value = self.ask(line, patience_s)
        except Failed as error:
            return error
        raise AssertionError(f"{line} came to {value!r}")


class Site:
    """Hosts; the first has the head, *nodes* of them have an agentd, the others have none."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, nodes: int, others: int, timers: dict[str, float]):
        self.folder = folder
        self.hosts = stack.enter_context(netns_kit.hosts(nodes + others))
        self.address = f"{self.hosts[0].ip}:6399"
        self._stack = stack
        self._nodes = nodes
        self._env = {
            **os.environ,
            "PYTHONPATH": f"{netns_kit.PROJECT}:{HERE}",
            "RLINF_HEAD": self.address,
            "RLINF_ACTORS_INSECURE_TEST_NETWORK": "1",
        }
        options = "[timers]\n" + "".join(f"{name} = {value}\n" for name, value in timers.items())
        self.agents = [
            netns_kit.agentd(
                host, folder / f"n{rank}", [sys.prefix], "--node-rank", str(rank),
                *(["--connect", self.address] if rank else ["--head", "--listen", self.address]),
                options=options,
            )
            for rank, host in enumerate(self.hosts[:nodes])
        ]  # fmt: skip
        stack.callback(self._stop)
        self.events = stack.enter_context(
            _ended(
                Lines(self._command(self.hosts[0], "-m", "rlinf_actors.cli.main", "events", "-f", "--json"), self._env)
            )
        )

    def driver(self, host: netns_kit.Host) -> contextlib.AbstractContextManager[Driver]:
        """A driver on *host*; it ends when its input does."""

        @contextlib.contextmanager
        def made() -> Iterator[Driver]:
            script = str(HERE / "partition_driver.py")
            with _ended(Driver(self._command(host, script, str(self.folder), str(self._nodes)), self._env)) as driver:
                assert driver.next() == "ready"
                yield driver

        return made()

    def kill_head(self) -> None:
        """Kill the first node's agentd, and with it the head, and start them again."""
        self.agents[0].kill()
        self.agents[0].wait(30)
        env = {**os.environ, "PYTHONPATH": str(netns_kit.PROJECT), "MARK": self.hosts[0].namespace}
        self.agents[0] = subprocess.Popen(self.agents[0].args, env=env, stdin=subprocess.DEVNULL, text=True)

    def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for the next event of this kind with these fields; skip earlier ones."""
        while True:
            event: dict[str, Any] = json.loads(self.events.next())
            if event["kind"] == kind and all(event[name] == value for name, value in fields.items()):
                return event

    def _command(self, host: netns_kit.Host, *arguments: str) -> list[str]:
        return host.command([sys.executable, *arguments])

    def _stop(self) -> None:
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:
            agent.wait(30)


@contextlib.contextmanager
def _ended(lines: Any) -> Iterator[Any]:
    with lines.process:
        try:
            yield lines
        finally:
            lines.process.stdin.close()
            lines.process.terminate()


@contextlib.contextmanager
def site(folder: Path, nodes: int, others: int = 0, timers: dict[str, float] = SHORT) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(stack, folder, nodes, others, timers)


CUTS = ("both", "towards", "back", "down")


@contextlib.contextmanager
def cut(how: str, one: netns_kit.Host, other: netns_kit.Host) -> Iterator[None]:
    """No network from *one* to *other* (towards), the other way (back), both ways, or one's plug out; then heal it."""
    ways = {"both": [(one, other), (other, one)], "towards": [(one, other)], "back": [(other, one)]}.get(how, [])
    if how == "down":
        one.link("down")
    for sender, receiver in ways:
        sender.drop(receiver)
    try:
        yield
    finally:
        if how == "down":
            one.link("up")
        for sender, receiver in ways:
            sender.undrop(receiver)


def ended(pids: Sequence[int], patience_s: float = PATIENCE_S) -> None:
    """Wait until these processes have ended."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([fd], [], [], patience_s)[0], f"process {pid} runs"
        os.close(fd)
