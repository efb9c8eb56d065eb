"""The commands of docs/how-to/read-logs.md, run as they are there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pace
import pytest
from live_workers import SCRIPT_ENV, many

from rlinf_actors import Worker
from rlinf_actors.cli import app

pytestmark = pytest.mark.live
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "read-logs.md"
COMMANDS = [line.partition("  #")[0].strip() for line in re.findall(r"^    \S.*$", PAGE.read_text(), re.MULTILINE)]
TRAIN = """
from rlinf_actors import Cluster, NodePlacementStrategy, Worker

class Actor(Worker):
    def step(self):
        print("loading model")
        self.log_info("stepped")

if __name__ == "__main__":
    with Cluster(num_nodes=1) as cluster:
        group = Actor.create_group().launch(cluster, NodePlacementStrategy([0] * 4), name="actor")
        group.step().wait()
"""


class Talker(Worker):
    def say(self) -> None:
        print(f"to stdout of {self._rank}", flush=True)
        print(f"to stderr of {self._rank}", file=sys.stderr, flush=True)


def test_commands_show_the_output_of_workers(local_cluster, monkeypatch, capsys):
    local = local_cluster(num_nodes=1)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="cell") as cluster:
        group = many(cluster, Talker, 4, name="actor")
        group.say().wait()
        group.shutdown()
    found = {}
    capsys.readouterr()
    assert app.run(["logs", "actor:3", "-n", "1", "--json"]) == 0
    id = json.loads(capsys.readouterr().out.splitlines()[0])["job_id"]
    for command in COMMANDS:
        if command.startswith("rlinf-actors logs"):
            assert app.run(shlex.split(command.replace("gpu-1", "node0").replace("6b8d35cb", id))[1:]) == 0
            found[command] = capsys.readouterr().out
    assert len(found) == 11
    for command, text in found.items():
        assert "to stderr of 3" in text, command
        assert ("to stdout of 3" in text) is ("--stderr" not in command), command
        assert ("to stdout of 0" in text) is ("--stderr" not in command and "actor:3" not in command), command
    assert "is registered" in found["rlinf-actors logs --node gpu-1 -n 100"]
    lines = [json.loads(line) for line in found["rlinf-actors logs actor --json"].splitlines()]
    assert {line["record"] for line in lines} == {None}


def run(command: str, tmp_path: Path) -> str:
    """Run a command line of the page. Its `python` is that of this environment."""
    env = {name: value for name, value in SCRIPT_ENV.items() if not name.startswith("RLINF_HEAD")}
    done = subprocess.run(
        ["bash", "-c", f'python() {{ "{sys.executable}" "$@"; }}\n{command}'], cwd=tmp_path, env=env,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout + done.stderr


def test_variables_change_what_the_driver_shows(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    single, as_json = [command for command in COMMANDS if command.endswith("python train.py")]
    text = run(single, tmp_path)
    for rank in range(4):
        assert re.search(rf"^\[actor:{rank}@\S+\] loading model$", text, re.MULTILINE)
    text = run(as_json, tmp_path)
    records = [json.loads(line) for line in re.findall(r"^\[actor:\d@\S+\] ({.*)$", text, re.MULTILINE)]
    assert [record["message"] for record in records] == ["stepped"] * 4
