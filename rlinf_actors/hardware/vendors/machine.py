"""The machine as a vendor's module sees it: files below one root, and tools that are run with limits.

A tool may hang, crash, or print for ever: none of that is an exception here. It is in what `Machine.run` returns.
"""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from rlinf_actors import procfs
from rlinf_actors.settings import PROBE_LIMIT, PROBE_ROOT

PROBE_TIMEOUT_S = 8.0
"""How long a vendor may take; a node is to be registered 10 s after its agent was started."""
LONGER = "Give it longer in agentd.toml, [hardware] probe_timeout_s"
_SHARE = 0.75
"""Of that time, what the tools get: what else was found must still be reported."""
MAX_OUTPUT_BYTES = 4 << 20
"""A tool that prints more is killed; eight devices take some tens of KiB."""
_KILL_S = 0.5
"""After SIGKILL a process in a driver's uninterruptible sleep stays; it is then left behind, and named."""
_TOOL_DIRECTORIES = ("/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/opt/rocm/bin")
"""Where drivers put their tools; a service's PATH need not have all of them."""


@dataclass(frozen=True)
class PciDevice:
    """A device on the PCI bus: address such as ``0000:17:00.0``, vendor such as ``0x10de``, class ``0x030200``."""

    bus: str
    vendor: str
    kind: str


@dataclass(frozen=True)
class Ran:
    """How a tool ended.

    Attributes:
        command: what was run, for messages.
        output: what it printed on standard output.
        fault: what went wrong, "" if it ended with exit code 0.
    """

    command: str
    output: str = ""
    fault: str = ""


class Machine:
    """This machine, or a directory tree that stands for one.

    Args:
        environ: PATH is where tools are looked for, and RLINF_ACTORS_PROBE_ROOT where files are.
        limit_s: seconds that the tools may take, all together, from now on.
    """

    def __init__(self, environ: Mapping[str, str], limit_s: float = PROBE_TIMEOUT_S) -> None:
        self._environ = {**environ, "LC_ALL": "C"}
        self._root = environ.get(PROBE_ROOT, "").rstrip("/")
        self._ends = time.monotonic() + limit_s
        self._limit_s = limit_s

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Machine:
        """The machine for a vendor's module: its tools must have ended before the process is killed."""
        return cls(environ, float(environ.get(PROBE_LIMIT) or PROBE_TIMEOUT_S) * _SHARE)

    # --- files ---

    def glob(self, pattern: str) -> list[str]:
        """The paths that match, sorted, as if the root were ``/``."""
        return sorted(path[len(self._root) :] for path in glob.glob(glob.escape(self._root) + pattern))

    def read(self, path: str) -> str:
        """A small file's text, stripped; "" where it is not there or cannot be read."""
        try:
            with open(self._root + path, errors="replace") as file:
                return file.read(1 << 16).strip()
        except OSError:
            return ""

    def number(self, path: str, unknown: int) -> int:
        """The number, decimal or with 0x, in a file; *unknown* where there is none."""
        try:
            return int(self.read(path), 0)
        except ValueError:
            return unknown

    @cached_property
    def pci_devices(self) -> list[PciDevice]:
        """Every device on the PCI bus, by address."""
        return [
            PciDevice(os.path.basename(path), self.read(f"{path}/vendor"), self.read(f"{path}/class"))
            for path in self.glob("/sys/bus/pci/devices/*")
        ]

    def numa_node(self, bus: str) -> int:
        """NUMA node of the device at a PCI address, -1 where unknown."""
        return self.number(f"/sys/bus/pci/devices/{bus}/numa_node", -1) if bus else -1

    def hwmon_celsius(self, bus: str) -> int:
        """The first temperature that a PCI device's driver measures, in degrees Celsius; -1 where it does not."""
        for path in self.glob(f"/sys/bus/pci/devices/{bus}/hwmon/hwmon*/temp[0-9]_input"):
            measured = self.number(path, -1)
            if measured >= 0:
                return measured // 1000
        return -1

    # --- tools ---

    def tool(self, name: str) -> str | None:
        """Path of a tool, None where it is not installed."""
        places = [self._environ.get("PATH", ""), *(self._root + directory for directory in _TOOL_DIRECTORIES)]
        return shutil.which(name, path=os.pathsep.join(filter(None, places)))

    def run(self, *command: str) -> Ran:
        """Run a tool; see run_all."""
        return self.run_all([command])[0]

    def run_all(self, commands: Sequence[Sequence[str]]) -> list[Ran]:
        """Run tools side by side, each with its arguments; blocks until all have ended or their time is over.

        What is left of a tool's process group after that is killed.
        """
        with contextlib.ExitStack() as stack:
            runs = [_Run.start(command, self.tool(command[0]), self._environ, stack) for command in commands]
            _attend([run for run in runs if run.child is not None], self._ends)
            return [run.end(self._limit_s) for run in runs]


class _Run:
    """One tool that runs, or could not be started."""

    def __init__(self, command: str, fault: str = "") -> None:
        self.command = command
        self.fault = fault
        self.child: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.printed: dict[int, bytearray] = {}
        """What came through the pipes of standard output and standard error so far."""

    @classmethod
    def start(
        cls, command: Sequence[str], path: str | None, environ: Mapping[str, str], stack: contextlib.ExitStack
    ) -> _Run:
        """Start it; *stack* closes what it needs."""
        run = cls(" ".join(command))
        if path is None:
            run.fault = f"{command[0]} is not installed: it is not on PATH ({environ.get('PATH', '')})"
            return run
        pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
        try:
            for reader, writer in pipes:
                stack.callback(os.close, reader)
                os.set_blocking(writer, True)
            run.child = subprocess.Popen(
                [path, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                env=dict(environ),
                preexec_fn=partial(_contain, os.getpid()),  # safe: this process has no other thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            run.fault = f"{run.command} cannot be started: {error}"
            return run
        finally:
            for _, writer in pipes:
                os.close(writer)
        run.printed = {reader: bytearray() for reader, _ in pipes}
        run.pidfd = os.pidfd_open(run.child.pid)
        stack.callback(os.close, run.pidfd)
        return run

    def read(self, pipe: int) -> bool:
        """Take what is in a pipe; False if nothing more will be. A tool that prints too much is killed."""
        while len(self.printed[pipe]) <= MAX_OUTPUT_BYTES:
            try:
                part = os.read(pipe, 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                return False
            self.printed[pipe] += part
        self.fault = f"{self.command} printed more than {MAX_OUTPUT_BYTES >> 20} MiB and was killed"
        self.kill()
        return False

    def kill(self) -> None:
        """Kill the tool and what it started. It is not reaped yet, so that nobody else has its group's number."""
        assert self.child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def end(self, limit_s: float) -> Ran:
        """What it said, after its end; whoever still runs is killed."""
        if self.child is None:
            return Ran(self.command, fault=self.fault)
        ended = bool(_ready([self.pidfd], 0))
        self.kill()
        if not ended and not _ready([self.pidfd], _KILL_S):
            return Ran(self.command, fault=f"{self.command} hangs in the driver, and cannot be killed")
        for pipe in self.printed:  # what is there, not until its end: a process that it left may keep it open
            self.read(pipe)
        code = self.child.wait()
        output, errors = (bytes(text[:MAX_OUTPUT_BYTES]).decode(errors="replace") for text in self.printed.values())
        if not ended:
            silent = f"{self.command} gave no answer within {limit_s:.2g} s"
            return Ran(self.command, output, self.fault or f"{silent}; it was killed. {LONGER}")
        return Ran(self.command, output, self.fault or _fault(self.command, code, errors or output))


def _fault(command: str, code: int, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    words = f"; its last words: {lines[-1][:200]}" if lines else ""
    if code < 0:
        cause = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        return f"{command} crashed ({cause}){words}"
    return f"{command} ended with exit code {code}{words}" if code else ""


def _contain(parent: int) -> None:
    """In the tool's process, before its program: a group of its own, and our end is its end."""
    os.setpgid(0, 0)
    procfs.die_with_parent(signal.SIGKILL, parent)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]  # ours is for reports; a tool may have a long log file
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _attend(runs: Sequence[_Run], ends: float) -> None:
    """Read what tools print, until all have ended or the time is over."""
    readers = {pipe: run for run in runs for pipe in run.printed}
    waiting = {run.pidfd for run in runs}
    while waiting and (ready := _ready([*waiting, *readers], ends - time.monotonic())):
        waiting -= set(ready)
        for pipe in readers.keys() & set(ready):
            if not readers[pipe].read(pipe):
                del readers[pipe]


def _ready(fds: Sequence[int], seconds: float) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]
