"""Heads, `rlinf-actors estop` and its button as real processes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pace

from rlinf_actors.cli import app
from rlinf_actors.settings import HEAD, HEADS_DIR, KEY_DIR, RUN_DIR

COMMAND = (sys.executable, "-m", "rlinf_actors.cli.main")
PRIVATE = """
import sys
from rlinf_actors import Cluster
with Cluster(num_nodes=1, namespace="lab"):
    print("up", flush=True)
    sys.stdin.read()
"""


class Machine:
    """A directory that stands for a machine: an emergency stop finds its heads there only."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.heads = folder / "heads"
        self.heads.mkdir()
        self.env = {**os.environ, HEADS_DIR: str(self.heads), KEY_DIR: str(folder / "keys"), RUN_DIR: str(folder)}
        self.env.pop(HEAD, None)
        self._ends = ends

    def start(self, *command: str, **options: object) -> tuple[subprocess.Popen[str], str]:
        """Start a process; return it and its first line. It is killed at the end."""
        env = {**self.env, **options.pop("env", {})}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env, **options
        )
        self._ends.enter_context(process)
        self._ends.callback(process.kill)
        return process, process.stdout.readline().strip()

    def head(self, **options: object) -> tuple[subprocess.Popen[str], str]:
        """A standing head and its address."""
        return self.start(*COMMAND, "head", "--listen", "127.0.0.1:0", **options)

    def private(self, folder: Path) -> subprocess.Popen[str]:
        """A script with a private cluster, and the job `lab` in it."""
        (folder / "train.py").write_text(PRIVATE)
        path = {"PYTHONPATH": ":".join(sys.path)}
        process, said = self.start(sys.executable, str(folder / "train.py"), cwd=folder, env=path)
        assert said == "up"
        return process

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments], env={**self.env, **env}, capture_output=True, text=True, check=False,
            timeout=pace.PATIENCE_S,
        )  # fmt: skip

    def estop(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("estop", *arguments, **env)

    def ask(self, address: str, *words: str) -> dict[str, Any]:
        """Run a command in this process; return what it prints."""
        with mock.patch.dict(os.environ, self.env, clear=True), redirect_stdout(io.StringIO()) as out:
            app.run([*words, "--json", "--head", address])
        return json.loads(out.getvalue())

    def in_force(self, address: str) -> list[str]:
        return self.ask(address, "status")["estop"]


class Armed:
    """A running `rlinf-actors estop --arm`, and its output."""

    def __init__(self, machine: Machine, *arguments: str, stdin: int = subprocess.PIPE, heads: int = 2) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "estop", "--arm", "--json", *arguments], env=machine.env, stdin=stdin,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.until("armed", heads)

    def until(self, event: str, armed: int | None = None) -> dict:
        """Wait for the next line with this event and *armed* heads."""
        while True:
            said = json.loads(self.process.stdout.readline())
            if said.get("event") == event and armed in (None, said["armed"]):
                return said

    def end(self) -> tuple[int, dict, str]:
        """Wait for the end; return exit code, report ({} without a stop), and stderr."""
        out, err = (
            self.process.stdout.read(),
            self.process.stderr.read(),
        )  # communicate() omits lines that readline() has read
        reports = [json.loads(line) for line in out.splitlines() if "clusters" in line]
        return self.process.wait(pace.PATIENCE_S), reports[-1] if reports else {}, err

    def __enter__(self) -> Armed:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:
            pass
