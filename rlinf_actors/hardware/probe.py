"""What this node has. ``python -m rlinf_actors.hardware.probe`` prints it as JSON.

Each vendor is asked in a subprocess of its own, started only where the vendor's device files or library exist, all at
once; so is RLINF_EXT_MODULE, and after it each vendor that it registers. One that hangs, crashes or talks nonsense
costs its own devices and is named in the faults. A machine without accelerators starts no process at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rlinf_actors import procfs
from rlinf_actors.compat import TaskGroup
from rlinf_actors.hardware.child import EXTENSION
from rlinf_actors.hardware.interfaces import ipv4_interfaces
from rlinf_actors.hardware.report import ProbeReport, resource_to_report
from rlinf_actors.hardware.vendors.catalog import VENDORS, vendor_of
from rlinf_actors.hardware.vendors.machine import LONGER, PROBE_TIMEOUT_S, Machine
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareResource
from rlinf_actors.settings import EXT_MODULE, PROBE_LIMIT

_STACK_S = 0.5
"""How long a child that hung may take to write where it is (faulthandler, on SIGABRT)."""
_KILL_S = 0.5
"""After SIGKILL a process in a driver's uninterruptible sleep stays; it is then left behind, and named."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = """
import sys
root = sys.argv.pop(1)
path = [entry for entry in sys.path if entry]  # nothing in the working directory stands in for a module of ours
sys.path[:] = path if root in path else [root, *path]  # the child uses this very package, however the parent found it
from rlinf_actors.hardware.child import main
main(sys.argv[1:])
"""
_FRAME = re.compile(r'^\s*File ".*", line \d+ in (\w+)', re.MULTILINE)


class ChildReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a child writes: `infos` are the fields of AcceleratorInfo, `vendors` the module of each one registered."""

    infos: list[AcceleratorInfo] = []
    faults: list[str] = []
    types: list[str] = []
    vendors: dict[str, str] = {}


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended: its exit code or less signal, None if it had to be killed (or could not even be)."""

    code: int | None
    output: bytes = b""
    errors: str = ""
    note: str = ""


async def run_probe(
    python: str | None = None, timeout_s: float = PROBE_TIMEOUT_S, env: Mapping[str, str] | None = None
) -> ProbeReport:
    """Find out what this node has.

    Call it from the main thread: the children end when the thread that started them does. Cancelling it kills them.

    Args:
        python: interpreter of the children, this one by default. It needs nvidia-ml-py for NVIDIA.
        timeout_s: seconds that each vendor may take, and the extension with the vendors that it registers. The
            answer is there a second later, whatever they do.
        env: environment of the children, os.environ by default; its visibility variables decide what is reported.

    Raises:
        Nothing because of what the hardware does: that is in the report's ``faults``.
    """
    environ = dict(os.environ if env is None else env)
    machine = Machine(environ)
    names = [vendor.kind.value for vendor in VENDORS if vendor.may_be_present(environ, machine)]
    interpreter = python or sys.executable
    asker = _Asker(interpreter, environ, asyncio.get_running_loop().time() + timeout_s, timeout_s)
    async with TaskGroup() as tasks:
        asking = [tasks.create_task(asker.vendor(name), name=f"probe {name}") for name in names]
        if environ.get(EXT_MODULE):
            asking.append(tasks.create_task(asker.extension(environ[EXT_MODULE]), name="probe extension"))
    answers = [answer for task in asking for answer in task.result()]
    return ProbeReport(
        hostname=os.uname().nodename,
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        python=sys.version.split()[0],
        interpreter=interpreter,
        resources=[
            resource_to_report(HardwareResource(answer.name, answer.report.infos, answer.module))
            for answer in answers
            if answer.report.infos
        ],
        interfaces=ipv4_interfaces(),
        faults=[
            fault if answer.name == EXTENSION else f"{answer.name}: {fault}"
            for answer in answers
            for fault in answer.report.faults
        ],
        extension_types=[name for answer in answers for name in answer.report.types],
    )


@dataclass(frozen=True)
class _Answer:
    """What was said by a vendor, of which `module` registered the type, or by the extension."""

    name: str
    report: ChildReport
    module: str = ""


@dataclass(frozen=True)
class _Asker:
    """Who asks the vendors: until `ends`, of the loop's clock, which is `timeout_s` after the start."""

    python: str
    environ: Mapping[str, str]
    ends: float
    timeout_s: float

    async def vendor(self, name: str, module: str = "", extension: str = "") -> list[_Answer]:
        """Ask one vendor."""
        return [_Answer(name, await self._ask(name, extension), module)]

    async def extension(self, extension: str) -> list[_Answer]:
        """Load the extension, then ask the vendors that it registers, in the time that is left."""
        first = _Answer(EXTENSION, await self._ask(EXTENSION, extension))
        async with TaskGroup() as tasks:
            asking = [
                tasks.create_task(self.vendor(name, module, extension), name=f"probe {name}")
                for name, module in first.report.vendors.items()
            ]
        return [first, *(answer for task in asking for answer in task.result())]

    async def _ask(self, name: str, extension: str) -> ChildReport:
        left_s = max(0.1, self.ends - asyncio.get_running_loop().time())
        arguments = [name, str(os.getpid()), *([extension] if extension else [])]
        end = await _ask(self.python, arguments, {**self.environ, PROBE_LIMIT: f"{left_s:.3f}"}, left_s)
        return read_answer(end, name, self.timeout_s)


def read_answer(end: ChildEnd, name: str, timeout_s: float) -> ChildReport:
    """What a child that ended like this found; a child that failed found one fault. Pure."""
    whose = f"{EXT_MODULE}: its module" if name == EXTENSION else "the vendor's library"
    if end.note:
        return ChildReport(faults=[end.note])
    if end.code is None:
        return ChildReport(
            faults=[f"{whose} gave no answer within {timeout_s:g} s{_where(end.errors)}; {_longer(name)}"]
        )
    if end.code < 0:
        cause = signal.Signals(-end.code).name if -end.code in signal.valid_signals() else f"signal {-end.code}"
        return ChildReport(faults=[f"{whose} crashed its process ({cause}){_where(end.errors)}"])
    if end.code > 0:
        return ChildReport(faults=[f"{whose} ended its process with exit code {end.code}{_last_line(end.errors)}"])
    try:
        report = msgspec.json.decode(end.output, type=ChildReport)
    except (msgspec.DecodeError, RecursionError) as error:
        return ChildReport(faults=[f"{whose} left no readable report ({error}): {end.output[:80]!r}"])
    if any(info.type != name for info in report.infos):
        return ChildReport(faults=[f"{whose} reported devices of another type: {report.infos[0].type}"])
    return report


def _longer(name: str) -> str:
    vendor = vendor_of(name)
    hint = f"; {vendor.hint}" if vendor is not None and vendor.hint else ""
    return f"it was killed. {LONGER}{hint}"


def _where(errors: str) -> str:
    frame = _FRAME.search(errors)
    return f" in {frame.group(1)}" if frame else _last_line(errors)


def _last_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"; its last words: {lines[-1][:300]}" if lines else ""


async def _ask(python: str, arguments: list[str], environ: Mapping[str, str], timeout_s: float) -> ChildEnd:
    """Start a child, wait for its end, kill whatever is left of its process group."""
    # Files instead of pipes: a grandchild that keeps a pipe open, or fills it, cannot hold us up.
    with (
        os.fdopen(os.memfd_create("probe-out"), "rb") as output,
        os.fdopen(os.memfd_create("probe-err"), "rb") as errors,
    ):
        try:
            child = subprocess.Popen(  # noqa: ASYNC220 - milliseconds; asyncio's own would wait on a thread
                [python, "-c", _START, _ROOT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            return ChildEnd(None, note=f"the probe's process cannot be started: {error}")
        code, note = await _until_end(child, timeout_s)
        return ChildEnd(code, _content(output.fileno()), _content(errors.fileno()).decode(errors="replace"), note)


async def _until_end(child: subprocess.Popen[bytes], timeout_s: float) -> tuple[int | None, str]:
    pidfd = os.pidfd_open(child.pid)
    try:
        in_time = gone = await _ended(pidfd, timeout_s)
        if not in_time:
            child.send_signal(signal.SIGABRT)
            await _ended(pidfd, _STACK_S)
        _kill_group(child)
        if not in_time:
            _kill_session(child.pid)
        gone = gone or await _ended(pidfd, _KILL_S)
        if not gone:
            return None, f"its library hangs in the driver, and process {child.pid} cannot be killed"
        code = child.wait()
        return (code if in_time else None), ""
    except BaseException:
        _kill_group(child)
        _kill_session(child.pid)
        if select.select([pidfd], [], [], _KILL_S)[0]:
            child.wait()
        raise
    finally:
        os.close(pidfd)


async def _ended(pidfd: int, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        loop.remove_reader(pidfd)  # level-triggered: it would fire until the process is reaped
        ended.set_result(None)

    loop.add_reader(pidfd, resolve)
    try:
        return bool((await asyncio.wait([ended], timeout=timeout_s))[0])
    finally:
        loop.remove_reader(pidfd)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it started. It must not be reaped yet: until then nobody else gets its group's number."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _kill_session(leader: int) -> None:
    """Kill the tools of a child that could not do so itself: they have groups of their own in its session."""
    for pid in procfs.pids():
        stat = procfs.stat(pid)
        if stat is not None and stat.session == leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _content(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, min(size, 1 << 20), 0)


def main() -> None:
    """Print the report of this node as JSON."""
    report: Any = asyncio.run(run_probe())
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
