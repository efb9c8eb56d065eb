"""Network namespaces joined by a bridge, and real virtual environments, for tests of several nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RUNTIME = ("pyzmq", "msgspec", "cloudpickle")
"""What an interpreter needs to run workers; the project itself comes from agentd."""


def can_make_namespaces() -> bool:
    """Whether this user may make namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"rla-try-{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


@dataclass(frozen=True)
class Host:
    """One namespace: a host of the test's own network."""

    namespace: str
    ip: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """*arguments* as a command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def link(self, state: str) -> None:
        """Pull its network plug (``down``), or put it in again (``up``)."""
        _ip("-n", self.namespace, "link", "set", "eth0", state)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """*count* hosts 10.213.7.1, .2, … whose interface is called eth0, joined by a bridge in a namespace of its own."""
    tag = uuid.uuid4().hex[:5]
    switch = f"rla{tag}sw"
    made: list[Host] = []
    with contextlib.ExitStack() as stack:
        _ip("netns", "add", switch)
        stack.callback(_ip, "netns", "del", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for n in range(count):
            name = f"rla{tag}n{n}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{n}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{n}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"10.213.7.{n + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            made.append(Host(name, f"10.213.7.{n + 1}"))
        yield made


def interpreter(minor: int) -> str | None:
    """A Python 3.*minor* that is not this one's, None where there is none."""
    name = f"python3.{minor}"
    candidates = [Path.home() / ".pyenv" / "versions", Path("/usr/bin")]
    for place in candidates:
        for path in sorted(place.glob(f"3.{minor}.*/bin/{name}")) or [place / name]:
            if path.exists() and subprocess.run([path, "-c", "pass"], check=False).returncode == 0:
                return str(path)
    return None


def make_venv(folder: Path, python: str, packages: Sequence[str]) -> str:
    """A real virtual environment; returns its interpreter."""
    exe = folder / "bin" / "python"
    if not exe.exists():
        subprocess.run([python, "-m", "venv", folder], check=True, stdin=subprocess.DEVNULL)
        command = [exe, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    return str(exe)
