"""A cluster with keys on loopback: real agentds and drivers, each with a key directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pace

from rlinf_actors.cli import app
from rlinf_actors.cli.queries import observing
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import Events, GetEvents
from rlinf_actors.wire.control_codec import Body

ROOT = Path(__file__).parents[2]
TIMERS = f"[timers]\nbeat_s = {0.2 * pace.slowness}\nlease_s = {5.0 * pace.slowness}\n"


@dataclass(frozen=True)
class Said:
    """What a command has written."""

    out: str
    err: str


class KeyedCluster:
    """The head is an agentd; `address` is its HOST:PORT. Every member has a directory under `place`, by its name.

    Args:
        place: a short path, for sockets.
        stack: what it starts is ended with this.
    """

    def __init__(self, place: Path, stack: contextlib.ExitStack) -> None:
        self.place = place
        self.address = ""
        self._stack = stack
        (place / "hw.json").write_text("{}")
        (place / "agentd.toml").write_text(TIMERS)
        self.keys("init", "--name", "kim")
        ports = stack.enter_context(contextlib.closing(HeldPorts()))
        port = ports.hold()  # for a head that is started again: nobody else is given it meanwhile
        self.head = self.agentd("head", "--head", "--listen", f"127.0.0.1:{port}")
        self.address = self.head.said["head"].removeprefix("tcp://")

    def folder(self, member: str) -> Path:
        """The key directory of a member."""
        return self.place / member

    def env(self, at: str) -> dict[str, str]:
        """The environment of a member."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "NOTIFY"))}
        mark = {name: value for name, value in os.environ.items() if name == "RLINF_ACTORS_TEST"}
        head = {"RLINF_HEAD": self.address} if self.address else {}
        if at == "nobody":  # not even this user's own key
            head["RLINF_ACTORS_INSECURE_TEST_NETWORK"] = "1"
        return {**clean, **mark, **head, "PYTHONPATH": str(ROOT), "RLINF_ACTORS_KEYS": str(self.folder(at))}

    # --- commands ---

    def cli(self, *arguments: str, at: str = "head", code: int = 0) -> Said:
        """Run `rlinf-actors` as a member."""
        out, err = io.StringIO(), io.StringIO()
        environment = mock.patch.dict(os.environ, self.env(at), clear=True)
        with environment, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = app.run(arguments)
        assert found == code, err.getvalue()
        return Said(out.getvalue(), err.getvalue())

    def keys(self, *arguments: str, at: str = "head") -> Any:
        """`rlinf-actors keys ... --json`."""
        return json.loads(self.cli("keys", *arguments, "--json", at=at).out)

    def token(self, name: str, *more: str) -> str:
        """A join token."""
        return str(self.keys("enroll", name, *more)["token"])

    def join(self, name: str, *more: str) -> None:
        """Enroll a member, by a token."""
        self.keys("join", self.token(name, *more), at=name)

    def ask(self, body: Body, at: str = "head") -> Body:
        """Ask the head as a member; raises what it refuses with."""

        async def ask() -> Body:
            async with observing(f"tcp://{self.address}", Settings.load()) as client:
                return await client.request(body, 30)

        with mock.patch.dict(os.environ, self.env(at), clear=True):
            return asyncio.run(ask())

    def until(self, kind: str, *words: str) -> str:
        """Wait for an event whose text has these words; its text."""
        since = 0
        while True:
            answer = self.ask(GetEvents(since, wait_s=20.0))
            assert isinstance(answer, Events)
            assert answer.events, f"no {kind} with {words}"
            since = answer.next
            for event in answer.events:
                if event.kind == kind and all(word in event.text for word in words):
                    return event.text

    # --- processes ---

    def agentd(self, name: str, *arguments: str) -> Agentd:
        """Start an agentd as a member; back when it is registered, or will not be."""
        return Agentd(self, self._stack, name, arguments)

    def node(self, name: str) -> Agentd:
        """Enroll and start one."""
        self.join(name)
        return self.agentd(name, "--connect", self.address)

    def driver(self, name: str, *arguments: str) -> Driver:
        """Start keyed_driver.py as a member."""
        return Driver(self, self._stack, name, arguments)


class Agentd:
    """An agentd and what it said when it was up."""

    def __init__(
        self, cluster: KeyedCluster, stack: contextlib.ExitStack, name: str, arguments: tuple[str, ...]
    ) -> None:
        read, write = os.pipe()
        place = cluster.place
        options = {"config": "agentd.toml", "run-dir": f"r-{name}", "log-dir": "log", "hardware": "hw.json"}
        command = [sys.executable, "-m", "agentd", "--ready-fd", str(write), *arguments]
        for option, path in options.items():
            command += [f"--{option}", str(place / path)]
        with open(place / f"{name}.log", "a") as log:
            self.process = subprocess.Popen(command, env=cluster.env(name), pass_fds=(write,), stderr=log)
        stack.callback(self.end)
        os.close(write)
        with os.fdopen(read) as pipe:
            self.said: dict[str, Any] = json.loads(pipe.readline() or "{}")

    def end(self) -> None:
        """SIGTERM, and SIGKILL to one that does not end by that."""
        self.process.terminate()
        try:
            self.process.wait(pace.PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Driver:
    """keyed_driver.py and its lines."""

    def __init__(
        self, cluster: KeyedCluster, stack: contextlib.ExitStack, name: str, arguments: tuple[str, ...]
    ) -> None:
        command = [sys.executable, str(Path(__file__).with_name("keyed_driver.py")), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=cluster.env(name), stdout=pipe, stderr=pipe, text=True)
        stack.callback(self.end)
        stack.callback(self.process.kill)

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said to stderr, once it has ended."""
        if self.process.stderr is not None and self.process.stderr.closed:
            return self.process.returncode, ""
        _, err = self.process.communicate(timeout=pace.PATIENCE_S)
        return self.process.returncode, err


def gone(pid: int) -> None:
    """Back when a process has ended that is not our child."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([watch], [], [], pace.PATIENCE_S)[0], f"process {pid} is still there"
    finally:
        os.close(watch)


@contextlib.contextmanager
def keyed_cluster() -> Iterator[KeyedCluster]:
    """A head with keys, and no other node."""
    with tempfile.TemporaryDirectory(prefix="kc-", dir="/tmp") as place, contextlib.ExitStack() as stack:
        yield KeyedCluster(Path(place), stack)
