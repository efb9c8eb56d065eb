"""A node whose agentd runs as root and starts each driver's workers as a user of their own: real uids and keys."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pace

from rlinf_actors.cli import app
from rlinf_actors.net.host import HeldPorts

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
USERS = {"lab-a": 61021, "lab-b": 61022}
"""The users of PLACE/passwd. Both are in the group `lab`; lab-a is in `gpus` too."""
LAB, GPUS = 61030, 61031
TIMERS = f"[timers]\nbeat_s = {0.2 * pace.slowness}\nlease_s = {5.0 * pace.slowness}\n"
CONFIG = f"""{TIMERS}
[workers]
users = {{ "driver-a" = "lab-a", "driver-b" = "lab-b" }}
umask = 0o027
limits = {{ core = 0 }}
"""


def why_not() -> str:
    """Return why agentd cannot change users here, or ""."""
    if os.getuid() != 0:
        return "needs root"
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return done.stderr.decode().strip() if done.returncode else ""


def make_accounts(place: Path) -> None:
    """Make passwd and group in *place*, with the users and what this machine has, and homes of the users."""
    lines = [Path("/etc", name).read_text() for name in ("passwd", "group")]
    accounts = "".join(f"{name}:x:{uid}:{LAB}::{place}/home-{name}:/bin/sh\n" for name, uid in USERS.items())
    (place / "passwd").write_text(lines[0] + accounts)
    (place / "group").write_text(f"{lines[1]}lab:x:{LAB}:\ngpus:x:{GPUS}:lab-a\n")
    for name in ("passwd", "group"):
        (place / name).chmod(0o644)
    for name, uid in USERS.items():
        (place / f"home-{name}").mkdir(mode=0o700)
        os.chown(place / f"home-{name}", uid, LAB)


class Node:
    """The head and the only node, an agentd with keys; `drivers` have keys of their own."""

    def __init__(self, place: Path, stack: contextlib.ExitStack, config: str = CONFIG) -> None:
        self.place, self.stack = place, stack
        place.chmod(0o711)
        make_accounts(place)
        (place / "hw.json").write_text("{}")
        (place / "head.toml").write_text(config)
        for name in ("hw.json", "head.toml"):
            (place / name).chmod(0o644)
        self.run("keys", "init", "--name", "kim", at="head")
        port = stack.enter_context(contextlib.closing(HeldPorts())).hold()
        self.address = f"127.0.0.1:{port}"
        self.run_dir = place / "run-head"
        self.agentd: subprocess.Popen[bytes]
        self.start()
        for name in ("driver-a", "driver-b", "driver-c"):
            token = json.loads(self.run("keys", "enroll", name, "--driver", "--json", at="head"))["token"]
            self.run("keys", "join", token, at=name)

    def env(self, at: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "NOTIFY"))}
        mark = {name: value for name, value in os.environ.items() if name == "RLINF_ACTORS_TEST"}
        head = {"RLINF_HEAD": self.address} if hasattr(self, "address") else {}
        return {**kept, **mark, **head, "PYTHONPATH": str(ROOT), "RLINF_ACTORS_KEYS": str(self.place / at)}

    def run(self, *arguments: str, at: str) -> str:
        out, err = io.StringIO(), io.StringIO()
        environment = mock.patch.dict(os.environ, self.env(at), clear=True)
        with environment, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run(arguments)
        assert code == 0, err.getvalue()
        return out.getvalue()

    def log(self) -> str:
        return (self.place / "agentd.log").read_text()

    def start(self) -> None:
        """Start the agentd with the head, and return when it is registered."""
        self.agentd = self.spawn("head", "root", "--head", "--listen", self.address)

    def join(self, name: str, user: str, config: str = TIMERS) -> subprocess.Popen[bytes]:
        """Enroll and start another node as *user* (mapped_agentd.py). Its key file belongs to root."""
        (self.place / name).mkdir(mode=0o700)
        key = str(self.place / name / "agent.key")
        self.run("keys", "enroll", name, "--user", user.removeprefix("+"), "--file", key, at="head")
        (self.place / f"{name}.toml").write_text(config)
        (self.place / f"{name}.toml").chmod(0o644)
        return self.spawn(name, user, "--connect", self.address)

    def spawn(self, name: str, user: str, *arguments: str) -> subprocess.Popen[bytes]:
        read, write = os.pipe()
        own = self.place if user == "root" else self.place / f"home-{user.removeprefix('+')}"
        role = "head" if name == "head" else "agent"
        options = {
            "config": str(self.place / f"{name}.toml"),
            "run-dir": str(own / f"run-{name}"),
            "log-dir": str(own / f"logs-{name}"),
            "hardware": str(self.place / "hw.json"),
        }
        command = [sys.executable, str(HERE / "mapped_agentd.py"), str(self.place), user]
        command += [str(self.place / name / f"{role}.key"), *arguments, "--ready-fd", str(write)]
        command += [word for option, value in options.items() for word in (f"--{option}", value)]
        with open(self.place / "agentd.log", "a") as log:
            made = subprocess.Popen(command, env=self.env(name), pass_fds=(write,), stderr=log, stdout=log)
        os.close(write)
        self.stack.callback(end, made)
        with os.fdopen(read) as pipe:
            said = json.loads(pipe.readline() or "{}")
        assert "head" in said, self.log()
        return made

    def driver(self, name: str, namespace: str, rank: int = 0, *more: str, cwd: Path | None = None) -> Driver:
        return Driver(self, name, namespace, str(rank), *more, cwd=cwd)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(pace.PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Driver:
    """mapped_driver.py with the key of driver *name*."""

    def __init__(self, node: Node, name: str, namespace: str, *more: str, cwd: Path | None) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, str(HERE / "mapped_driver.py"), namespace, *more]
        self.errors = node.place / f"{namespace}.err"
        with open(self.errors, "w") as err:
            self.process = subprocess.Popen(
                command, env=node.env(name), stdin=pipe, stdout=pipe, stderr=err, text=True, cwd=cwd
            )
        node.stack.callback(self.end)
        self.output: list[str] = []

    def answer(self) -> Any:
        """Return the next answer; lines that the worker printed go to `output`."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            try:
                return json.loads(line)
            except ValueError:
                self.output.append(line)
        raise AssertionError(f"the driver has ended: {self.errors.read_text()}")

    def ask(self, method: str, *arguments: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def finish(self) -> None:
        """Let the driver end by itself, with its cluster, and wait for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(pace.PATIENCE_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
