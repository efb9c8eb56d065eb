"""The entry point as a process, and a head that it starts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from rlinf_actors.cli import app, output
from rlinf_actors.security import keyfile
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.settings import Settings


def cli(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RLINF_")}
    return subprocess.run(
        [sys.executable, "-m", "rlinf_actors.cli.main", *arguments],
        capture_output=True, text=True, env={**clean, **env}, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["keys", "init"], ["status"], ["doctor"], ["estop"], ["workers"]])
def test_the_commands_run_without_the_extra(arguments, tmp_path):
    """On a terminal, where rich would draw the tables."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('rich', 'rich.console', 'psutil', 'torch')));"
        f"from rlinf_actors.cli.main import main; sys.exit(main({arguments}))"
    )
    ours, theirs = os.openpty()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RLINF_")}
    places = {
        "XDG_CONFIG_HOME": str(tmp_path),
        "RLINF_ACTORS_RUN_DIR": str(tmp_path),
        "RLINF_ACTORS_HEADS": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False,
        env={**clean, **places},
    )  # fmt: skip
    os.close(theirs)
    os.close(ours)
    assert "Traceback" not in done.stderr
    assert done.returncode == {"keys": 0, "doctor": 0, "estop": 69}.get(arguments[0], 78), done.stderr


def test_a_table_on_a_terminal_is_plain_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.show_table(("NAME", "STATE"), [("a", "ready")], "")
    assert capsys.readouterr().out == "NAME  STATE\na     ready\n"


def test_the_entry_point_loads_neither_click_nor_rich():
    code = "import sys, rlinf_actors.cli.main; print([m for m in ('click', 'rich', 'zmq') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["nodes", "--nonsense"], ["plan"], ["plan", "no-such-file"]])
def test_wrong_usage_exits_with_64(arguments, capsys):
    assert app.run(arguments) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: rlinf-actors")


@pytest.mark.parametrize("arguments", [["--help"], ["nodes", "-h"], ["plan", "--help"]])
def test_help_shows_the_usage(arguments, capsys):
    assert app.run(arguments) == 0
    assert capsys.readouterr().out.startswith("Usage: rlinf-actors")


def test_a_head_outside_loopback_needs_keys(capsys):
    assert app.run(["head", "--listen", "0.0.0.0:0"]) == 78
    assert "it is outside loopback, and there is no key here" in capsys.readouterr().err


def test_an_address_without_a_port_is_refused(capsys):
    assert app.run(["head", "--listen", "somewhere"]) == 78
    assert "--listen" in capsys.readouterr().err


def test_absent_head_exits_with_69(monkeypatch, capsys):
    monkeypatch.setattr("rlinf_actors.cli.queries.TIMEOUT_S", 0.05)
    monkeypatch.setattr("rlinf_actors.net.reachability.CONNECT_S", 10.0)  # long: a late refusal counts as a refusal
    assert app.run(["nodes", "--head", "127.0.0.1:1"]) == 69
    assert "did not answer GetStatus within 0.05 s; nobody listens there" in capsys.readouterr().err


@pytest.mark.live
async def test_a_head_answers_and_ends_on_sigterm(monkeypatch, tmp_path):
    """This user's keys may belong to another cluster."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    key = KeyFile("driver", "kim", KeyPair.make(), KeyPair.make().public)
    keyfile.save(keyfile.directory(Settings.load()) / "driver.key", key)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlinf_actors.cli.main", "head", "--listen", "127.0.0.1:0",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        answer = await asyncio.to_thread(cli, "status", "--json", RLINF_HEAD=address)
        assert (answer.returncode, answer.stderr) == (0, "")
        assert json.loads(answer.stdout)["nodes"] == {}
        nodes = await asyncio.to_thread(cli, "nodes", "--head", address)
        assert (nodes.returncode, nodes.stdout, nodes.stderr) == (0, "", "no node has registered\n")
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert "Traceback" not in err.decode()
