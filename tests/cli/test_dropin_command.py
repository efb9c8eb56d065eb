"""`rlinf-actors dropin` runs a command with rlinf.scheduler served by rlinf_actors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from rlinf_actors.cli.app import run

ASK = "from rlinf.scheduler import Worker; print(Worker.__module__)"
SERVED = "rlinf_actors.worker.worker"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "rlinf" / "scheduler").mkdir(parents=True)
    (tmp_path / "rlinf" / "__init__.py").write_text("")
    (tmp_path / "rlinf" / "scheduler" / "__init__.py").write_text("class Worker: pass")
    return tmp_path


def test_the_command_and_its_children_have_the_door(checkout):
    inner = f"import subprocess, sys; {ASK}; subprocess.run([sys.executable, '-c', {ASK!r}])"
    command = [sys.executable, "-m", "rlinf_actors.cli.main", "dropin", "--", sys.executable, "-c", inner]
    paths = os.pathsep.join([str(checkout), str(ROOT)])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.stdout.split() == [SERVED] * 2, done.stderr


def test_an_installed_door_opens_only_if_the_variable_asks_for_it(checkout):
    python = checkout / "venv" / "bin" / "python"
    venv.create(checkout / "venv", symlinks=True)
    environ = {name: value for name, value in os.environ.items() if name != "RLINF_ACTORS_DROPIN"}
    environ["PYTHONPATH"] = os.pathsep.join([str(checkout), str(ROOT), *sys.path])

    def said(**env: str) -> str:
        return subprocess.check_output([python, "-c", ASK], text=True, timeout=60, env={**environ, **env}).strip()

    def change(option: str) -> str:
        command = [python, "-m", "rlinf_actors.cli.main", "dropin", option]
        done = subprocess.run(command, check=True, timeout=60, env=environ, stderr=subprocess.PIPE, text=True)
        return done.stderr.partition(" ")[0]

    theirs, asked = "rlinf.scheduler", {"RLINF_ACTORS_DROPIN": "1"}
    assert (said(), said(**asked)) == (theirs, theirs)
    change("--install")
    assert (said(), said(**asked), said(RLINF_ACTORS_DROPIN="0")) == (theirs, SERVED, theirs)
    assert (change("--uninstall"), change("--uninstall")) == ("removed", "there")
    assert not list(checkout.glob("venv/lib/python*/site-packages/rlinf_actors*"))


def test_the_commands_of_the_page_run_a_program(checkout):
    page = (ROOT / "docs" / "how-to" / "rlinf.md").read_text()
    commands = re.findall(r"^ +((?:rlinf-actors|python -m rlinf_actors\.dropin) .*train\.py.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    (checkout / "train.py").write_text(f"import sys; {ASK}; print(sys.argv)")
    programs = {"rlinf-actors": f"{sys.executable} -m rlinf_actors.cli.main", "python": sys.executable}
    paths = os.pathsep.join([str(checkout), str(ROOT)])
    for command in commands:
        words = " ".join(programs.get(word, word) for word in command.split())
        done = subprocess.run(
            words.split(),
            capture_output=True,
            text=True,
            timeout=60,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert done.returncode == 0, done.stderr
        shown = "" if "--check" in command else f"{SERVED}\n['train.py', 'ARGUMENTS']\n"
        assert done.stdout == shown


@pytest.mark.parametrize("words", [[], ["--install", "python"], ["--", "no-such-program"]])
def test_a_wrong_use_is_refused(words, capsys):
    assert run(["dropin", *words]) == 64
    assert capsys.readouterr().err
