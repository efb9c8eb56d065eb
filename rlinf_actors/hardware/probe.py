"""What this node has. ``python -m rlinf_actors.hardware.probe`` prints it as JSON.

Each vendor's library is asked in a subprocess of its own, started only where the vendor's device files or library
exist, all at once; so is RLINF_EXT_MODULE. One that hangs, crashes or talks nonsense costs its own devices and is named
in the faults. A machine without accelerators starts no process at all.
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

from rlinf_actors.compat import TaskGroup
from rlinf_actors.hardware.child import EXTENSION
from rlinf_actors.hardware.interfaces import ipv4_interfaces
from rlinf_actors.hardware.report import ProbeReport, resource_to_report
from rlinf_actors.hardware.vendors import VENDORS
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareResource
from rlinf_actors.settings import EXT_MODULE
from rlinf_actors.wire.values import ResourceReport

PROBE_TIMEOUT_S = 30.0
"""Without its persistence daemon, NVIDIA's driver takes seconds to wake each of eight GPUs."""
_STACK_S = 1.0
"""How long a child that hung may take to write where it is (faulthandler, on SIGABRT)."""
_KILL_S = 2.0
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
    """What a child writes: `infos` are the fields of AcceleratorInfo."""

    infos: list[AcceleratorInfo] = []
    faults: list[str] = []
    types: list[str] = []


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
        timeout_s: seconds that each child may take.
        env: environment of the children, os.environ by default; its visibility variables decide what is reported.

    Raises:
        Nothing because of what the hardware does: that is in the report's ``faults``.
    """
    environ = dict(os.environ if env is None else env)
    names = [vendor.kind.value for vendor in VENDORS if vendor.may_be_present(environ)]
    extension = environ.get(EXT_MODULE)
    interpreter = python or sys.executable
    async with TaskGroup() as tasks:
        asked = {
            name: tasks.create_task(
                _ask(interpreter, [name, str(os.getpid())], environ, timeout_s), name=f"probe {name}"
            )
            for name in names
        }
        if extension:
            arguments = [EXTENSION, str(os.getpid()), extension]
            asked[EXTENSION] = tasks.create_task(
                _ask(interpreter, arguments, environ, timeout_s), name="probe extension"
            )
    resources: list[ResourceReport] = []
    faults: list[str] = []
    types: list[str] = []
    for name, task in asked.items():
        report = read_answer(task.result(), name, timeout_s)
        faults += [fault if name == EXTENSION else f"{name}: {fault}" for fault in report.faults]
        types += report.types
        if report.infos:
            resources.append(resource_to_report(HardwareResource(name, report.infos)))
    return ProbeReport(
        hostname=os.uname().nodename,
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        python=sys.version.split()[0],
        interpreter=interpreter,
        resources=resources,
        interfaces=ipv4_interfaces(),
        faults=faults,
        extension_types=types,
    )


def read_answer(end: ChildEnd, name: str, timeout_s: float) -> ChildReport:
    """What a child that ended like this found; a child that failed found one fault. Pure."""
    whose = f"{EXT_MODULE}: its module" if name == EXTENSION else "the vendor's library"
    if end.note:
        return ChildReport(faults=[end.note])
    if end.code is None:
        return ChildReport(faults=[f"{whose} gave no answer within {timeout_s:g} s{_where(end.errors)}; it was killed"])
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
        gone = gone or await _ended(pidfd, _KILL_S)
        if not gone:
            return None, f"its library hangs in the driver, and process {child.pid} cannot be killed"
        code = child.wait()
        return (code if in_time else None), ""
    except BaseException:
        _kill_group(child)
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


def _content(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, min(size, 1 << 20), 0)


def main() -> None:
    """Print the report of this node as JSON."""
    report: Any = asyncio.run(run_probe())
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
