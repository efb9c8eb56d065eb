"""The commands of pages run as they are written, as processes of their own, on a cluster of two nodes with a job.

A page's commands run in their order. NAME, GROUP, gpu-1 and the like stand for parts of that cluster. Commands that go
on until a person ends them run in a terminal, where the test presses the key. tests/page_blocks.py says which blocks
run.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pace
import page_blocks
import pytest

from rlinf_actors import Channel, Cluster, EndedError, GroupClosedError, NodePlacementStrategy, Worker, WorkerGroup
from rlinf_actors.testing import LocalCluster
from tests.cli.terminal import terminal

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]  # a page has up to 14 commands

STAND_FOR = {
    "GROUP": "actor", "NAME": "cell", "NODE": "node1", "gpu-1": "node0", "actors": "actor",
    "doctor --head": "doctor --no-paths --head", "--bundle": "--no-paths --bundle",  # paths: once, in install.md
}  # fmt: skip
KEYS = {
    "rlinf-actors top": ("actor:3", "q", 0),
    "rlinf-actors serve": ("http://", "\x03", 0),
    "rlinf-actors events -f": ("actor", "\x03", 130),
    "rlinf-actors events -f --since 10m": ("actor", "\x03", 130),
    "rlinf-actors estop --arm": ("ARMED", "\x03", 130),
    'rlinf-actors worker kill actor:3 --reason "hangs"': ("[y/N]", "y\n", 0),
    "rlinf-actors job stop cell": ("[y/N]", "y\n", 0),
    "rlinf-actors group stop actor": ("[y/N]", "y\n", 0),
}
"""Commands that wait for a person: the text after which the test presses a key, the key, and the exit code."""
SHOWN = {
    "debug-a-hang": ("waits in", "actor:3"),
    "install": ("PASS",),
    "operate": ("cell", "actor:3", "rollouts"),
    "set-up-robots": ("labels",),
    "stop-robots": ("STOPPED", "hand in the cell"),
    "survive-failures": ("new disk", "actor"),
    "trace-a-job": ("trace.json",),
    "watch-a-cluster": ("http://",),
}
"""The pages, each with words that the output of its commands has."""


class Actor(Worker):
    def step(self) -> None:
        print("stepped", flush=True)

    def wait_for(self, channel: Channel) -> None:
        channel.get()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name in ("home", "heads"):
        folder.joinpath(name).mkdir(mode=0o700)
    folder.joinpath("home/.local/share/bash-completion/completions").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def env(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a person at a terminal whose home is the folder. `estop` finds only the heads of this test."""
    own = {"HOME": str(folder / "home"), "RLINF_ACTORS_HEADS": str(folder / "heads")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        with LocalCluster(2) as local, local.cluster(namespace="cell"):
            patch.setenv("RLINF_HEAD", local.head)
            for name, value in local.driver_env.items():
                patch.setenv(name, value)
            patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            yield dict(os.environ)


class Job:
    """A group that waits at a channel. After a command that ends it there is another."""

    def __init__(self) -> None:
        self.group: WorkerGroup[Actor] | None = None
        self.waiting: Any = None

    def start(self) -> None:
        """Launch the group, unless it is there."""
        if self.group is not None:
            return
        channel = Channel.create("rollouts")
        channel.put(1, key="left")
        self.group = Actor.create_group().launch(Cluster(), NodePlacementStrategy([0, 0, 0, 1]), name="actor")
        self.group.step().wait()
        self.waiting = self.group.wait_for(channel)

    def stop(self) -> None:
        """End the group and the channel."""
        runtime = Cluster().runtime
        for one in runtime.groups.all():
            if one.owned and not one.gone.done():
                runtime.io.submit(runtime.groups.stop(one, 0.0)).result(pace.PATIENCE_S)
        with contextlib.suppress(EndedError, GroupClosedError):
            self.waiting.wait()
        self.group = None


@pytest.fixture(scope="module")
def job(env: dict[str, str]) -> Job:
    return Job()


def as_here(line: str, env: dict[str, str]) -> str:
    """The command, for this cluster."""
    line = re.sub(r"\.venv/bin/|/opt/rlinf/bin/", "", line)
    line = re.sub(r"\[(--[^\]]+)\]", r"\1", line)  # what may be left out
    for word, ours in {**STAND_FOR, **dict.fromkeys(("HOST:PORT", "10.0.0.1:6380"), env["RLINF_HEAD"])}.items():
        line = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", ours, line)
    return line


def run(line: str, env: dict[str, str], folder: Path) -> str:
    """Run a command to its end, and return what it shows."""
    if line in KEYS:
        text, key, code = KEYS[line]
        with terminal(command=("bash", "-c", f"cd {folder}; exec {line}")) as shell:
            shell.until(text)
            shell.type(key)
            assert shell.end() == code, (line, shell.shown)
        return shell.shown
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=pace.PATIENCE_S,
    )  # fmt: skip
    codes = (0, 1) if " doctor" in line else (0,)  # doctor finds faults of this machine
    assert done.returncode in codes, (line, done.stdout, done.stderr)
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", SHOWN)
def test_commands_of_a_page_run(page: str, job: Job, env: dict[str, str], folder: Path) -> None:
    [path] = [path for path in page_blocks.PAGES if path.stem == page]
    shown, ran = "", 0
    for block in page_blocks.blocks(path, ""):
        for line in block.lines if block.reason is None else ():
            if line.startswith("rlinf-actors keys "):
                continue  # tests/netns/test_pages_on_machines.py
            if " node drain " in line:
                job.stop()  # the command waits until the node has no workers
            elif " node " not in line:
                job.start()
            shown += run(as_here(line, env), env, folder)
            ran += 1
            if re.search(r" (stop|kill|estop) ", line):
                job.stop()
    assert ran
    for words in SHOWN[page]:
        assert words in shown
