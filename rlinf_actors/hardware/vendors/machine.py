"""Machine: a vendor's access to files of this machine, and to command-line tools with limits.

If a tool hangs, crashes or prints without end, `Machine.run` raises nothing: its result has a fault. `Machine.run`
blocks, so it is called in the probe's child processes only.
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
from functools import cached_property, partial

import msgspec

from rlinf_actors import procfs
from rlinf_actors.settings import PROBE_LIMIT, PROBE_ROOT

PROBE_TIMEOUT_S = 8.0
"""Seconds that a vendor may take: a node has to register within 10 s after agentd has started."""
LONGER = "Give it longer in agentd.toml, [hardware] probe_timeout_s"
_SHARE = 0.75
"""Part of the time limit that tools may use. The rest is left to report the results of the other tools."""
MAX_OUTPUT_BYTES = 4 << 20
"""A tool that prints more bytes is killed. Eight devices take some tens of KiB."""
_KILL_S = 0.5
"""Seconds after SIGKILL until a process counts as unkillable (in the uninterruptible sleep of a device driver)."""
_TOOL_DIRECTORIES = ("/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/opt/rocm/bin")
"""Directories where drivers install tools; the PATH of a systemd service may lack some of them."""


PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
"""A PCI address. Group 1 has the form that the kernel uses; some tools pad the domain to eight digits."""


def leading_number(text: str) -> int:
    """Return the number (of up to four digits) at the start of *text*; -1 if there is none."""
    match = re.match(r"\d{1,4}", text)
    return int(match.group()) if match else -1


class PciDevice(msgspec.Struct, frozen=True):
    """A device on the PCI bus, with its address, vendor id and class as the kernel spells them."""

    bus: str  # such as 0000:17:00.0
    vendor: str  # such as 0x10de
    kind: str  # such as 0x030200


class Ran(msgspec.Struct, frozen=True):
    """Result of running a tool.

    Attributes:
        command: the command line.
        output: standard output of the tool.
        fault: a sentence that says what went wrong; "" if the tool ended with exit code 0.
    """

    command: str
    output: str = ""
    fault: str = ""

    def faults(self, read: object, otherwise: str) -> list[str]:
        """Return one fault if the tool failed, or if a parser found nothing in its output; else [].

        *read* is what the parser found. *otherwise* says what the tool did if it did not fail but nothing was found,
        such as "printed no table".
        """
        if self.fault or not read:
            return [self.fault or f"{self.command} {otherwise}: {self.output[:80]!r}"]
        return []


class Machine:
    """Files and tools of this machine, or of a directory tree that stands for a machine in tests.

    Args:
        environ: environment of the tools. Its PATH is searched for them; its RLINF_ACTORS_PROBE_ROOT, if set, is the
            directory that stands for ``/``.
        limit_s: seconds that all tools together may take, counted from now.
    """

    def __init__(self, environ: Mapping[str, str], limit_s: float = PROBE_TIMEOUT_S) -> None:
        self._environ = {**environ, "LC_ALL": "C"}
        self._root = environ.get(PROBE_ROOT, "").rstrip("/")
        self._ends = time.monotonic() + limit_s
        self._limit_s = limit_s

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Machine:
        """Return a Machine for a vendor's ``find``.

        Its tools may use three quarters of the probe's time limit, so that the process can still report what it found.

        Args:
            environ: environment that ``find`` got from the probe.
        """
        return cls(environ, float(environ.get(PROBE_LIMIT) or PROBE_TIMEOUT_S) * _SHARE)

    # --- files ---

    def glob(self, pattern: str) -> list[str]:
        """Return the absolute paths that match *pattern*, sorted."""
        return sorted(path[len(self._root) :] for path in glob.glob(glob.escape(self._root) + pattern))

    def read(self, path: str) -> str:
        """Return the stripped text of a file (its first 64 KiB); "" if the file cannot be read."""
        try:
            with open(self._root + path, errors="replace") as file:
                return file.read(1 << 16).strip()
        except OSError:
            return ""

    def number(self, path: str, unknown: int) -> int:
        """Return the number in a file, decimal or with 0x; *unknown* if the file has no number or cannot be read."""
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
        """Return the NUMA node of the device at PCI address *bus*; -1 if unknown."""
        return self.number(f"/sys/bus/pci/devices/{bus}/numa_node", -1) if bus else -1

    def hwmon_celsius(self, bus: str) -> int:
        """Return the first temperature that hwmon in sysfs has for the device at PCI address *bus*; -1 if unknown.

        The unit is degrees Celsius.
        """
        for path in self.glob(f"/sys/bus/pci/devices/{bus}/hwmon/hwmon*/temp[0-9]_input"):
            measured = self.number(path, -1)
            if measured >= 0:
                return measured // 1000
        return -1

    # --- tools ---

    def tool(self, name: str) -> str | None:
        """Return the path of a tool; None if it is not installed."""
        places = [self._environ.get("PATH", ""), *(self._root + directory for directory in _TOOL_DIRECTORIES)]
        return shutil.which(name, path=os.pathsep.join(filter(None, places)))

    def run(self, *command: str) -> Ran:
        """Run one tool. Block until it has ended, or was killed because it reached a limit.

        Args:
            command: name of the tool, and its arguments.

        Returns:
            Its output, and a fault if the tool is missing, failed, hung or printed more than MAX_OUTPUT_BYTES.
        """
        return self.run_all([command])[0]

    def run_all(self, commands: Sequence[Sequence[str]]) -> list[Ran]:
        """Run several tools at the same time. Block until all have ended or were killed because they reached a limit.

        Args:
            commands: name of each tool, and its arguments.

        Returns:
            The results, in the order of *commands*.
        """
        with contextlib.ExitStack() as stack:
            runs = [_Run.start(command, self.tool(command[0]), self._environ, stack) for command in commands]
            _attend([run for run in runs if run.child is not None], self._ends)
            return [run.end(self._limit_s) for run in runs]


class _Run:
    """A tool that runs. If the tool could not be started, ``child`` is None and ``fault`` says why."""

    def __init__(self, command: str, fault: str = "") -> None:
        self.command = command
        self.fault = fault
        self.child: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.printed: dict[int, bytearray] = {}
        """Bytes read so far, by descriptor of the pipe: first standard output, then standard error."""

    @classmethod
    def start(
        cls, command: Sequence[str], path: str | None, environ: Mapping[str, str], stack: contextlib.ExitStack
    ) -> _Run:
        """Start the tool at *path*. If *path* is None, the tool is not installed, and the result has a fault.

        When *stack* is closed, it closes the descriptors of the result.
        """
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
        """Read the output that is in a pipe. Return True if more may come, False if not.

        If the tool has printed more than MAX_OUTPUT_BYTES, kill it and return False.
        """
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
        """Kill the tool's process group.

        The tool must not be reaped yet, because after that another process group may have the same id.
        """
        assert self.child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def end(self, limit_s: float) -> Ran:
        """Kill the tool if it still runs, reap it, and return its output and fault.

        *limit_s* is the time limit that the tool had, for the text of the fault.
        """
        if self.child is None:
            return Ran(self.command, fault=self.fault)
        ended = bool(_ready([self.pidfd], 0))
        self.kill()
        if not ended and not _ready([self.pidfd], _KILL_S):
            return Ran(self.command, fault=f"{self.command} hangs in the driver, and cannot be killed")
        for pipe in self.printed:  # do not wait for its end: a process that the tool left may keep it open
            self.read(pipe)
        code = self.child.wait()
        output, errors = (bytes(text[:MAX_OUTPUT_BYTES]).decode(errors="replace") for text in self.printed.values())
        if not ended:
            silent = f"{self.command} gave no answer within {limit_s:.2g} s"
            return Ran(self.command, output, self.fault or f"{silent}; it was killed. {LONGER}")
        return Ran(self.command, output, self.fault or _fault(self.command, code, errors or output))


def _fault(command: str, code: int, said: str) -> str:
    if code < 0:
        return f"{command} crashed ({signal_name(-code)}){last_words(said)}"
    return f"{command} ended with exit code {code}{last_words(said)}" if code else ""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV; a text with the number if it has no name."""
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


def last_words(said: str) -> str:
    """Return the last line of a program's output *said*, as text to append to a sentence about the program's failure.

    Return "" if the program printed nothing.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"; its last words: {lines[-1][:300]}" if lines else ""


def _contain(parent: int) -> None:
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
