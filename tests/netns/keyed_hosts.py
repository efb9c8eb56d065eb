"""Agents and commands with keys on hosts of a test's network; each member has its own key directory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import netns_kit

from rlinf_actors.cli import app

HERE = Path(__file__).resolve().parent
MODULES = f"{netns_kit.PROJECT}:{HERE}:{HERE.parent / 'live'}"
"""PYTHONPATH for the project and the classes that tests launch."""


def environment(place: Path, name: str, **more: str) -> dict[str, str]:
    """The environment of the member *name*."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RLINF", "NOTIFY"))}
    own = {"RLINF_ACTORS_KEYS": str(place / name), "RLINF_ACTORS_CACHE_DIR": str(place / f"cache-{name}")}
    return {**clean, "PYTHONPATH": MODULES, **own, **more}


def cli(env: dict[str, str], *arguments: str) -> dict:
    """Run `rlinf-actors`, which must need no network, in this process, and return its output."""
    out, err = io.StringIO(), io.StringIO()
    changed = mock.patch.dict(os.environ, env, clear=True)
    with changed, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run([*arguments, "--json"])
    assert code == 0, err.getvalue()
    return json.loads(out.getvalue())


def agentd(host: netns_kit.Host, place: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    """Return when the agentd has registered."""
    read, write = os.pipe()
    command = [
        sys.executable, "-m", "agentd", "--run-dir", str(place / f"r-{name}"), "--ready-fd", str(write), *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(host.command(command), env=environment(place, name), pass_fds=(write,), text=True)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = json.loads(pipe.readline() or "{}")
    assert "head" in said, said
    return process


def joined(host: netns_kit.Host, place: Path, address: str, name: str, rank: int) -> subprocess.Popen[str]:
    """Enroll a node, and start its agentd on *host*; the caller ends it."""
    run_dir = str(place / "r-head")
    made = cli(environment(place, "head"), "keys", "enroll", name, "--address", address, "--head", run_dir)
    return agentd(host, place, name, "--connect", address, "--node-rank", str(rank), "--token", made["token"])


def two_nodes(head: netns_kit.Host, far: netns_kit.Host, place: Path, address: str) -> list[subprocess.Popen[str]]:
    """Start a head with a node at *address*, and a node "far"; the caller ends both."""
    cli(environment(place, "head"), "keys", "init")
    first = agentd(head, place, "head", "--head", "--listen", address, "--node-rank", "0")
    try:
        return [first, joined(far, place, address, "far", 1)]
    except BaseException:
        first.terminate()
        first.wait(30)
        raise
