"""Network namespaces joined by a bridge, and real virtual environments, for tests of several nodes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_actors import procfs

PROJECT = Path(__file__).resolve().parents[2]


NAMED = Path("/run/netns")
"""Where `ip netns` keeps the names."""
_OWNED = re.compile(r"rla(\d+)-(\d+)-")


def _owned() -> str:
    """Return the begin of a name that tells whose it is: this process, with its start time."""
    me = os.getpid()
    return f"rla{me}-{procfs.stat_of(me).started}-{uuid.uuid4().hex[:5]}"


def sweep() -> None:
    """Remove the namespaces of test runs that were killed, and kill the processes that run in them."""
    for name in os.listdir(NAMED) if NAMED.exists() else ():
        owner = _OWNED.match(name)
        if owner is None or _runs(int(owner[1]), int(owner[2])):
            continue
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # or another run does just now


def _runs(pid: int, start: int) -> bool:
    found = procfs.stat(pid)
    return found is not None and found.started == start and found.state != "Z"


def can_make_namespaces() -> bool:
    """True if this user may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"{_owned()}try"
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
        """Return the command line that runs *arguments* on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def link(self, state: str) -> None:
        """Take this host's network interface down, or up again."""
        _ip("-n", self.namespace, "link", "set", "eth0", state)

    def drop(self, to: Host) -> None:
        """Silently lose all frames to that host: they go to an address without an owner.

        As ``iptables -j DROP`` would, which needs a kernel module and a program that many machines do not have.
        """
        lost = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.namespace, "neigh", "replace", to.ip, *lost)

    def undrop(self, to: Host) -> None:
        """End `drop`."""
        _ip("-n", self.namespace, "neigh", "del", to.ip, "dev", "eth0")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


Wire = tuple[str, Sequence[str]]
"""The bridge of an interface, and its addresses with prefix lengths."""


@contextlib.contextmanager
def wired(plan: Sequence[Mapping[str, Wire]]) -> Iterator[list[Host]]:
    """One host for each entry of *plan*, which maps its interfaces to their wires; the bridges are a namespace's own.

    A host's `ip` is the first address of its first interface.
    """
    sweep()
    tag = _owned()
    switch = f"{tag}sw"
    made: list[Host] = []
    with contextlib.ExitStack() as stack:
        _ip("netns", "add", switch)
        stack.callback(_ip, "netns", "del", switch)
        for bridge in sorted({bridge for wires in plan for bridge, _ in wires.values()}):
            _ip("-n", switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", switch, "link", "set", bridge, "up")
        for n, wires in enumerate(plan):
            name = f"{tag}n{n}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            for number, (interface, (bridge, addresses)) in enumerate(wires.items()):
                port = f"port{n}-{number}"
                _ip("-n", name, "link", "add", interface, "type", "veth", "peer", "name", port, "netns", switch)
                _ip("-n", switch, "link", "set", port, "master", bridge, "up")
                for address in addresses:
                    _ip("-n", name, "addr", "add", address, "dev", interface)
                _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            made.append(Host(name, next(iter(wires.values()))[1][0].partition("/")[0]))
        yield made


def hosts(count: int) -> contextlib.AbstractContextManager[list[Host]]:
    """*count* hosts 10.213.7.1, .2, … whose interface is called eth0, joined by a bridge."""
    return wired([{"eth0": ("br0", [f"10.213.7.{n + 1}/24"])} for n in range(count)])


def default_route(host: Host, via: str) -> None:
    """Make *via* the default route of *host*."""
    _ip("-n", host.namespace, "route", "add", "default", "via", via)


def agentd(
    host: Host, folder: Path, interpreters: Sequence[str], *arguments: str, options: str = ""
) -> subprocess.Popen[str]:
    """agentd on *host*, with its run directory *folder*, which may start the interpreters below *interpreters*.

    *options* are further tables of its configuration.
    """
    folder.mkdir(mode=0o700)
    config = folder / "agentd.toml"
    config.write_text(f"[workers]\ninterpreters = {json.dumps(list(interpreters))}\n{options}")
    command = [
        sys.executable, "-m", "agentd", "--config", str(config), "--run-dir", str(folder), "--insecure-test-network",
        *arguments,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "MARK": host.namespace}
    return subprocess.Popen(host.command(command), env=env, stdin=subprocess.DEVNULL, text=True)


def own_venv(folder: Path, modules: Sequence[str]) -> str:
    """A virtual environment of this Python, with the *modules* of this one; returns its interpreter.

    The modules are linked, not installed: to install torch alone takes a minute.
    """
    exe = folder / "bin" / "python"
    if not exe.exists():
        venv.create(folder, symlinks=True)
        places = {str(Path(str(importlib.import_module(name).__file__)).parents[1]) for name in modules}
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "found.pth").write_text("\n".join(sorted(places)))
    return str(exe)
