"""A cluster with keys on loopback: real agentds and drivers, each with a key directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMERS = "[timers]\nbeat_s = 0.2\nlease_s = 5.0\n"


class KeyedCluster:
    """The head is an agentd; `address` is its HOST:PORT. Every member has a directory under `place`, by its name.

    Args:
        place: a short path, for sockets.
        stack: what it starts is ended with this.
    """

    def __init__(self, place: Path, stack: contextlib.ExitStack) -> None:
        self.place = place
        self._stack = stack
        (place / "hw.json").write_text("{}")
        (place / "agentd.toml").write_text(TIMERS)
        self.keys("init", "--name", "kim", at="head")
        self.head = self.agentd("head", "--head", "--listen", "127.0.0.1:0")
        self.address = self.head.said["head"].removeprefix("tcp://")

    def keys_of(self, member: str) -> str:
        """The key directory of a member."""
        return str(self.place / member)

    def env(self, at: str, **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF", "NOTIFY"))}
        return {**clean, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "RLINF_ACTORS_KEYS": self.keys_of(at), **more}

    def cli(self, *arguments: str, at: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run `rlinf-actors` as a member."""
        command = [sys.executable, "-m", "rlinf_actors.cli.main", *arguments]
        more = {"RLINF_HEAD": self.address} if hasattr(self, "address") else {}
        done = subprocess.run(
            command, env=self.env(at, **more), capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == code, done.stderr
        return done

    def keys(self, *arguments: str, at: str = "head") -> Any:
        """`rlinf-actors keys ... --json`."""
        return json.loads(self.cli("keys", *arguments, "--json", at=at).stdout)

    def token(self, name: str, *more: str) -> str:
        return self.keys("enroll", name, *more)["token"]

    def join(self, name: str, *more: str) -> None:
        """Enroll a member, by a token."""
        self.keys("join", self.token(name, *more), "--dir", self.keys_of(name), at=name)

    def agentd(self, name: str, *arguments: str) -> Agentd:
        """Start an agentd as a member; back when it is registered."""
        return Agentd(self, self._stack, name, arguments)

    def node(self, name: str) -> Agentd:
        """Enroll and start one."""
        self.join(name)
        return self.agentd(name, "--connect", self.address)

    def driver(self, name: str, *arguments: str) -> Driver:
        """Start keyed_driver.py as a member."""
        return Driver(self, self._stack, name, arguments)

    def events(self) -> list[dict[str, Any]]:
        """The whole event log, as the administrator reads it."""
        lines = self.cli("events", "--json", at="head").stdout.splitlines()
        return [json.loads(line) for line in lines]

    def until(self, kind: str, *words: str) -> str:
        """Wait for an event whose text has these words; its text."""
        command = [sys.executable, "-m", "rlinf_actors.cli.main", "events", "--follow", "--json"]
        env = self.env("head", RLINF_HEAD=self.address, PYTHONUNBUFFERED="1")
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    event = json.loads(line)
                    if event["kind"] == kind and all(word in event["text"] for word in words):
                        return str(event["text"])
            finally:
                process.kill()
        raise AssertionError(f"no {kind} with {words}")


class Agentd:
    """An agentd and what it said when it was up."""

    def __init__(
        self, cluster: KeyedCluster, stack: contextlib.ExitStack, name: str, arguments: tuple[str, ...]
    ) -> None:
        read, write = os.pipe()
        place = cluster.place
        command = [
            sys.executable, "-m", "agentd", "--config", str(place / "agentd.toml"), "--run-dir", str(place / f"r-{name}"),
            "--log-dir", str(place / "log"), "--hardware", str(place / "hw.json"), "--ready-fd", str(write), *arguments,
        ]  # fmt: skip
        self.log = place / f"{name}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=cluster.env(name), pass_fds=(write,), stderr=log)
        stack.callback(self._end)
        os.close(write)
        with os.fdopen(read) as pipe:
            self.said = json.loads(pipe.readline() or "{}")

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Driver:
    """keyed_driver.py and its lines."""

    def __init__(
        self, cluster: KeyedCluster, stack: contextlib.ExitStack, name: str, arguments: tuple[str, ...]
    ) -> None:
        command = [sys.executable, str(Path(__file__).with_name("keyed_driver.py")), *arguments]
        self.process = stack.enter_context(
            subprocess.Popen(
                command,
                env=cluster.env(name, RLINF_HEAD=cluster.address),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said to stderr, once it has ended."""
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@contextlib.contextmanager
def keyed_cluster() -> Iterator[KeyedCluster]:
    """A head with keys, and no other node."""
    with tempfile.TemporaryDirectory(prefix="kc-") as place, contextlib.ExitStack() as stack:
        yield KeyedCluster(Path(place), stack)
