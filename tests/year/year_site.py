"""Two machines, each with a real systemd that runs the shipped units: a head and an agentd, and another agentd.

agentd runs as root, and the workers of each of three drivers as a user of their own. Log files are on a small disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pace

from rlinf_actors.cli import app
from rlinf_actors.cli.events_command import read_events
from rlinf_actors.cluster.event_stream import EventCursor
from rlinf_actors.systemd import unit_files
from rlinf_actors.wire.client_messages import Events
from rlinf_actors.wire.event_values import ClusterEvent

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "agentd"), str(HERE.parent / "security")]

import mapped_kit  # noqa: E402
import systemd_box  # noqa: E402
from year_hooks import Hooks  # noqa: E402

AGENTD, WORKERS, HEAD = "rlinf-agentd", "rlinf-workers", "rlinf-head"
PROGRAMS = {"@AGENTD@": f"{sys.executable} -m agentd", "@RLINF_ACTORS@": f"{sys.executable} -m rlinf_actors.cli.main"}
DRIVERS = {"driver-a": "lab-a", "driver-b": "lab-b", "driver-c": "root"}
"""The user of each driver's workers."""
LOG_DISK = 16 << 20
LOG_TOTAL = LOG_DISK // 4
"""Bytes of log files that agentd keeps."""
ETC = """mount -t tmpfs etc {place}
mkdir -p {place}/upper/rlinf-actors {place}/work
mount -t overlay overlay -o lowerdir=/etc,upperdir={place}/upper,workdir={place}/work /etc"""
"""Lets a machine have an /etc/rlinf-actors of its own."""
HEAD_ID = 61041
"""Of the head's user and group."""
NEXT = "0.1.0+next"
"""The version to which nodes are upgraded."""
CONFIG = """
[head]
connect = "{address}"
[node]
name = "{name}"
rank = {rank}
[hardware]
described = "{place}/hw.json"
[timers]
probe_s = 0.5
unresponsive_s = 1.5
[workers]
users = {users}
log_max_mb = 0.5
log_total_max_gb = {log_total_gb}
"""


@dataclass
class Machine:
    """One machine: its systemd, and its name as a node."""

    name: str
    box: systemd_box.Box
    units: dict[str, str]
    logs_were_full: bool = False  # the log files have been cut to LOG_TOTAL

    @property
    def root(self) -> Path:
        """Its file system, as this process sees it."""
        return Path(f"/proc/{self.box.pid}/root")

    def main(self, unit: str) -> str:
        """The pid of a unit's main process, in the machine's pid namespace."""
        return self.box.ctl("show", "-P", "MainPID", unit)

    def run(self, *command: str, **env: str) -> str:
        process = self.box.popen(*command, **env)
        out, _ = process.communicate()
        return out

    def kill(self, pid: object, signal: str = "KILL") -> None:
        self.run("kill", f"-{signal}", str(pid))

    def logs(self) -> Path:
        return self.root / "var/log/rlinf-agentd"

    def upgrade(self, before: Path, code: Path) -> None:
        """Let agentd run *code* in place of *before*, and restart it as an administrator does."""
        drop_in = self.root / f"run/systemd/system/{AGENTD}.service.d/test.conf"
        drop_in.write_text(drop_in.read_text().replace(f"PYTHONPATH={before}\n", f"PYTHONPATH={code}\n"))
        self.box.ctl("daemon-reload")
        self.box.ctl("restart", AGENTD)


@dataclass
class Driver:
    """A driver's process, which year_driver.py runs on the first machine."""

    name: str
    job: str
    process: subprocess.Popen[str]
    pids: list[int] = field(default_factory=list)  # of its workers, in the pid namespaces of their machines

    def ask(self, line: str) -> str:
        """Send a line, and return the answer."""
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("year: "):  # others are of workers
                return line.removeprefix("year: ").strip()
        return "it has ended"

    def end(self, how: str = "end") -> int:
        """Let the script end, and return its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.tell(how)
        self.process.communicate(timeout=pace.PATIENCE_S)
        return self.process.returncode


class Site:
    """The running cluster."""

    def __init__(self, place: Path, machines: list[Machine], address: str) -> None:
        self.place, self.machines, self.address = place, machines, address
        self.drivers: list[Driver] = []
        self.hooks: Hooks
        self.told_since = 0  # the number of the last event before the hooks work

    @property
    def one(self) -> Machine:
        return self.machines[0]

    @property
    def two(self) -> Machine:
        return self.machines[1]

    # --- commands ---

    def cli(self, *arguments: str, keys: str = "head", code: int | None = 0) -> str:
        """Run `rlinf-actors` in this process, and return what it prints."""
        out, err = io.StringIO(), io.StringIO()
        with self.environment(keys), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            ended = app.run(list(arguments))
        assert code in (None, ended), f"{arguments}: {ended}\n{out.getvalue()}{err.getvalue()}"
        return out.getvalue()

    def environment(self, keys: str) -> contextlib.AbstractContextManager[object]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "NOTIFY"))}
        own = {"RLINF_ACTORS_KEYS": str(self.place / keys), "RLINF_HEAD": self.address}
        return mock.patch.dict(os.environ, {**clean, **own}, clear=True)

    def join(self, folder: str, *enroll: str) -> None:
        """Enroll a member, and join as that member, whose keys are then in *folder*."""
        token = json.loads(self.cli("keys", "enroll", *enroll, "--json"))["token"]
        self.cli("keys", "join", "--dir", str(self.place / folder), token)

    def json(self, *arguments: str) -> object:
        return json.loads(self.cli(*arguments, "--json"))

    def last_event(self) -> int:
        """Return the number of the newest event."""
        return self.read(EventCursor(None, None), 1)[-1].next

    def dropped_events(self) -> int:
        """Return how many events the head has dropped, because its event log was full."""
        return sum(answer.missing for answer in self.read(EventCursor(None)))

    def read(self, cursor: EventCursor, most: int | None = None) -> list[Events]:
        """Return the head's answers to a reader of the event log, up to its end, or the first *most*."""
        answers: list[Events] = []

        def each(answer: Events, _: object) -> bool:
            answers.append(answer)
            return answer.more and len(answers) != most

        with self.environment("head"):
            read_events(self.address, cursor, False, each, pace.PATIENCE_S)
        return answers

    def event(self, fits: Callable[[ClusterEvent], bool], since: int) -> ClusterEvent:
        """Wait for an event after number *since*. The head may be away meanwhile."""
        found: list[ClusterEvent] = []

        def each(_: object, events: list[ClusterEvent]) -> bool:
            found.extend(event for event in events if fits(event))
            return not found

        with self.environment("head"):
            try:
                read_events(self.address, EventCursor(None, since), True, each, pace.PATIENCE_S)
            except asyncio.TimeoutError:
                raise AssertionError(f"no event fits; since {since} there were:\n{self.events(since)}") from None
        return found[0]

    def events(self, since: int) -> str:
        """Return the last lines of the event log after number *since*."""
        return self.cli("events", "--since", str(since))[-4000:]

    # --- drivers ---

    def start(self, driver: str, job: str) -> Driver:
        """Start a driver, and return it without waiting; `wait_up` waits."""
        self.drivers.append(self._start(driver, job))
        return self.drivers[-1]

    def _start(self, driver: str, *arguments: str) -> Driver:
        command = sys.executable, str(HERE / "year_driver.py"), *arguments
        env = {"RLINF_HEAD": self.address, "RLINF_ACTORS_KEYS": str(self.place / driver), "PYTHONPATH": str(ROOT)}
        return Driver(driver, arguments[0], self.one.box.popen(*command, **env))

    def run_small(self, name: str, count: int, at_once: int = 1) -> None:
        """Run so many small jobs of each user, *at_once* at a time, and wait for their ends."""
        started = [
            self._start(driver, f"{name}-{number}-{driver}", str(count // at_once))
            for driver in DRIVERS
            for number in range(at_once)
        ]
        self.drivers += started
        for driver in started:
            said = driver.answer()
            assert said == "done", f"{driver.job}: {said}\n{self.events(0)}"
            driver.process.communicate()
            self.drivers.remove(driver)

    def wait_up(self, driver: Driver) -> Driver:
        word, _, pids = driver.answer().partition(" ")
        assert word == "up", f"{driver.job} did not start: {word} {pids}\n{self.events(0)}"
        driver.pids = json.loads(pids)
        return driver

    def close(self) -> None:
        for driver in self.drivers:
            driver.process.kill()
            driver.process.communicate()


def stats(place: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of each file below *place*. What is removed meanwhile is left out."""
    for directory, _, names in os.walk(place):
        for path in (os.path.join(directory, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                yield path, os.lstat(path)


def size(place: Path) -> int:
    """Return the bytes on the disk of all files below *place*."""
    return sum(found.st_blocks * 512 for _, found in stats(place))


@contextlib.contextmanager
def site(place: Path, port: int) -> Iterator[Site]:
    """Boot both machines, start all units, and enroll nodes and drivers, as "Install" of the documentation says."""
    place.chmod(0o711)
    (place / "hw.json").write_text("{}")
    mapped_kit.make_accounts(place)
    for file, line in (("passwd", f"{HEAD_ID}:{HEAD_ID}::/:/bin/false"), ("group", f"{HEAD_ID}:")):
        with open(place / file, "a") as accounts:
            accounts.write(f"{HEAD}:x:{line}\n")
    address = f"127.0.0.1:{port}"
    made = Site(place, [], address)
    made.cli("keys", "init", "--dir", str(place / "head"), "--name", "kim")
    _next_version(place / "next")
    with contextlib.ExitStack() as stack:
        for name in ("one", "two"):
            keys = place / f"keys-{name}"
            keys.mkdir(mode=0o700)
            made.machines.append(Machine(name, stack.enter_context(_boot(place, name, keys, address)), {}))
        for file in ("head.key", "driver.key"):
            shutil.copy2(place / "head" / file, place / "keys-one" / file)
        made.hooks = Hooks(made.one.root, HEAD_ID)
        stack.callback(made.hooks.close)
        made.one.box.ctl("start", HEAD)
        for number, machine in enumerate(made.machines):
            made.join(f"keys-{machine.name}/root", machine.name, "--user", "root")
            (place / f"{machine.name}.toml").write_text(
                CONFIG.format(address=address, name=machine.name, rank=number, place=place, users=_users(),
                              log_total_gb=LOG_TOTAL / (1 << 30))
            )  # fmt: skip
            machine.run("mkdir", "-p", "/var/log/rlinf-agentd")
            machine.run("mount", "-t", "tmpfs", "-o", f"size={LOG_DISK},mode=755", "logs", "/var/log/rlinf-agentd")
            machine.box.ctl("start", "--no-block", AGENTD)
        for machine in made.machines:
            machine.box.ctl("start", AGENTD)  # waits
        for driver in DRIVERS:
            made.join(driver, driver, "--driver")
        stack.callback(made.close)
        yield made


def _users() -> str:
    return "{ " + ", ".join(f'"{driver}" = "{user}"' for driver, user in DRIVERS.items()) + " }"


@contextlib.contextmanager
def _boot(place: Path, name: str, keys: Path, address: str) -> Iterator[systemd_box.Box]:
    alone = "[Unit]\nDefaultDependencies=no\n[Service]\nRestartSec=100ms\nEnvironment=PYTHONDONTWRITEBYTECODE=1\n"
    paths = f"{alone}Environment=PYTHONPATH={ROOT}\n"
    files = {
        unit: unit_files.text(unit, PROGRAMS).replace("/etc/rlinf-actors/keys", str(keys)) for unit in unit_files.UNITS
    }
    shown = " ".join(sorted({str(ROOT), sys.prefix, sys.base_prefix}))  # a checkout may be below /tmp
    head = f"BindReadOnlyPaths={shown}\nEnvironment=RLINF_ACTORS_LISTEN={address}\n"
    files[f"{unit_files.HEAD}.d/test.conf"] = paths + head
    files[f"{unit_files.ROOT_AGENTD}.d/test.conf"] = f"{paths}Environment=RLINF_ACTORS_CONFIG={place}/{name}.toml\n"
    files[f"{unit_files.ROOT_WORKERS}.d/test.conf"] = paths
    files["network-online.target"] = ""  # masked, so that systemd starts no services of a whole machine
    own = place / f"accounts-{name}"
    own.mkdir(mode=0o711)
    for file in ("passwd", "group"):
        shutil.copy2(place / file, own / file)
    (own / "etc").mkdir()
    (own / "machine-id").write_text(f"{hashlib.sha256(name.encode()).hexdigest()[:32]}\n")
    accounts = ETC.format(place=own / "etc")
    accounts += f"; {sys.executable} {HERE.parent}/security/mapped_agentd.py {own}"
    accounts += f"; mount --bind {own}/machine-id /etc/machine-id; mount -t tmpfs -o mode=1777 shm /dev/shm"
    with systemd_box.box(files, "", accounts) as started:
        yield started


def _next_version(code: Path) -> None:
    """Copy the code to *code*, as a later version."""
    for package in ("rlinf_actors", "agentd"):
        shutil.copytree(ROOT / package, code / package)  # what is compiled, too: no process writes that here
    file = code / "rlinf_actors" / "version.py"
    text = file.read_text()
    file.write_text(text.replace('VERSION = "0.1.0"', f'VERSION = "{NEXT}"'))
    assert NEXT in file.read_text()
