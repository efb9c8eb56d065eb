"""Agents and commands with keys on hosts of a test's network; each member has its own key directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import netns_kit

HERE = Path(__file__).resolve().parent
MODULES = f"{netns_kit.PROJECT}:{HERE}:{HERE.parent / 'live'}"
"""PYTHONPATH for the project and the classes that tests launch."""


def environment(place: Path, name: str, **more: str) -> dict[str, str]:
    """The environment of the member *name*."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RLINF", "NOTIFY"))}
    own = {"RLINF_ACTORS_KEYS": str(place / name), "RLINF_ACTORS_CACHE_DIR": str(place / f"cache-{name}")}
    return {**clean, "PYTHONPATH": MODULES, **own, **more}


def cli(host: netns_kit.Host, env: dict[str, str], *arguments: str) -> dict:
    """Run `rlinf-actors` and return its output."""
    command = host.command([sys.executable, "-m", "rlinf_actors.cli.main", *arguments, "--json"])
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


def joined(
    head: netns_kit.Host, host: netns_kit.Host, place: Path, address: str, name: str, rank: int
) -> subprocess.Popen[str]:
    """Start the agentd of an enrolled node on *host*; the caller ends it."""
    run_dir = str(place / "r-head")
    token = cli(head, environment(place, "head"), "keys", "enroll", name, "--address", address, "--head", run_dir)
    cli(host, environment(place, name), "keys", "join", token["token"])
    return agentd(host, place, name, "--connect", address, "--node-rank", str(rank))


def two_nodes(head: netns_kit.Host, far: netns_kit.Host, place: Path, address: str) -> list[subprocess.Popen[str]]:
    """Start a head with a node at *address*, and a node "far"; the caller ends both."""
    cli(head, environment(place, "head"), "keys", "init")
    first = agentd(head, place, "head", "--head", "--listen", address, "--node-rank", "0")
    try:
        return [first, joined(head, far, place, address, "far", 1)]
    except BaseException:
        first.terminate()
        first.wait(30)
        raise
