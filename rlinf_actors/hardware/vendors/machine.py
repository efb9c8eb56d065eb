"""The machine as a vendor's module sees it: files below one root, and tools that run with limits.

A tool that hangs, crashes, or prints without end is no exception: `Machine.run` returns it as a fault. Used in the
probe's children only; blocks.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
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
"""Seconds that a vendor may take: a node must register within 10 s of its agent's start."""
LONGER = "Give it longer in agentd.toml, [hardware] probe_timeout_s"
_SHARE = 0.75
"""Part of that time for the tools: the rest is for reporting the other results."""
MAX_OUTPUT_BYTES = 4 << 20
"""A tool that prints more is killed; eight devices take some tens of KiB."""
_KILL_S = 0.5
"""Seconds from SIGKILL until a process is given up as unkillable, in a driver's uninterruptible sleep."""
_TOOL_DIRECTORIES = ("/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/opt/rocm/bin")
"""Directories of drivers' tools, which may not be on a service's PATH."""


PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
"""Group 1 is the address as the kernel writes it; some tools pad the domain to eight digits."""


def leading_number(text: str) -> int:
    """Return the number of up to four digits at the start of *text*, -1 without one."""
    match = re.match(r"\d{1,4}", text)
    return int(match.group()) if match else -1


@dataclass(frozen=True)
class PciDevice:
    """A device on the PCI bus: address such as ``0000:17:00.0``, vendor such as ``0x10de``, class ``0x030200``."""

    bus: str
    vendor: str
    kind: str


@dataclass(frozen=True)
class Ran:
    """End of a tool.

    Attributes:
        command: the command line, for messages.
        output: its standard output.
        fault: what went wrong, "" if it ended with exit code 0.
    """

    command: str
    output: str = ""
    fault: str = ""


class Machine:
    """This machine, or a directory tree that stands for one.

    Args:
        environ: PATH is searched for tools; RLINF_ACTORS_PROBE_ROOT is the root of files.
        limit_s: seconds that the tools may take, all together, from now on.
    """

    def __init__(self, environ: Mapping[str, str], limit_s: float = PROBE_TIMEOUT_S) -> None:
        self._environ = {**environ, "LC_ALL": "C"}
        self._root = environ.get(PROBE_ROOT, "").rstrip("/")
        self._ends = time.monotonic() + limit_s
        self._limit_s = limit_s

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Machine:
        """Return the machine for a vendor's module: its tools must end before the probe kills the process."""
        return cls(environ, float(environ.get(PROBE_LIMIT) or PROBE_TIMEOUT_S) * _SHARE)

    # --- files ---

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that match, sorted, as if the root were ``/``."""
        return sorted(path[len(self._root) :] for path in glob.glob(glob.escape(self._root) + pattern))

    def read(self, path: str) -> str:
        """Return a small file's text, stripped; "" if it cannot be read."""
        try:
            with open(self._root + path, errors="replace") as file:
                return file.read(1 << 16).strip()
        except OSError:
            return ""

    def number(self, path: str, unknown: int) -> int:
        """Return the number, decimal or with 0x, in a file; *unknown* without one."""
        try:
            return int(self.read(path), 0)
        except ValueError:
            return unknown

    @cached_property
    def pci_devices(self) -> list[PciDevice]:
        return [
            PciDevice(os.path.basename(path), self.read(f"{path}/vendor"), self.read(f"{path}/class"))
            for path in self.glob("/sys/bus/pci/devices/*")
        ]

    def numa_node(self, bus: str) -> int:
        """Return the NUMA node of the device at a PCI address, -1 if unknown."""
        return self.number(f"/sys/bus/pci/devices/{bus}/numa_node", -1) if bus else -1

    def hwmon_celsius(self, bus: str) -> int:
        """Return the first temperature that a PCI device's driver measures, in degrees Celsius; -1 without one."""
        for path in self.glob(f"/sys/bus/pci/devices/{bus}/hwmon/hwmon*/temp[0-9]_input"):
            measured = self.number(path, -1)
            if measured >= 0:
                return measured // 1000
        return -1

    # --- tools ---

    def tool(self, name: str) -> str | None:
        """Return the path of a tool, None if it is not installed."""
        places = [self._environ.get("PATH", ""), *(self._root + directory for directory in _TOOL_DIRECTORIES)]
        return shutil.which(name, path=os.pathsep.join(filter(None, places)))

    def run(self, *command: str) -> Ran:
        return self.run_all([command])[0]

    def run_all(self, commands: Sequence[Sequence[str]]) -> list[Ran]:
        """Run tools side by side, each with its arguments. Blocks until all have ended or their time is over.

        The rest of a tool's process group is killed after that.
        """
        with contextlib.ExitStack() as stack:
            runs = [_Run.start(command, self.tool(command[0]), self._environ, stack) for command in commands]
            _attend([run for run in runs if run.child is not None], self._ends)
            return [run.end(self._limit_s) for run in runs]


class _Run:
    """A tool that runs, or could not be started."""

    def __init__(self, command: str, fault: str = "") -> None:
        self.command = command
        self.fault = fault
        self.child: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.printed: dict[int, bytearray] = {}
        """Bytes read from the pipes of standard output and standard error so far."""

    @classmethod
    def start(
        cls, command: Sequence[str], path: str | None, environ: Mapping[str, str], stack: contextlib.ExitStack
    ) -> _Run:
        """Start the tool; *stack* closes its descriptors."""
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
        """Read a pipe; False at its end. A tool that prints too much is killed."""
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
        """Kill the tool and its process group. Call it before the tool is reaped: its group number is not reused until
        then.
        """
        assert self.child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def end(self, limit_s: float) -> Ran:
        """Kill a tool that still runs, and return its output and fault."""
        if self.child is None:
            return Ran(self.command, fault=self.fault)
        ended = bool(_ready([self.pidfd], 0))
        self.kill()
        if not ended and not _ready([self.pidfd], _KILL_S):
            return Ran(self.command, fault=f"{self.command} hangs in the driver, and cannot be killed")
        for pipe in self.printed:  # only what is there: a process that the tool left behind may keep the pipe open
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
    """Prepare the tool's process: a group of its own, and it ends with this process. Runs between fork and exec."""
    os.setpgid(0, 0)
    procfs.die_with_parent(signal.SIGKILL, parent)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]  # our limit is for reports; a tool may write a long log file
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _attend(runs: Sequence[_Run], ends: float) -> None:
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
