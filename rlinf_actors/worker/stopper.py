"""The stopper of a robot worker: a process that runs stop_hardware when the worker has ended.

The watchdog forks it before the worker, which shares no thread, lock, library state or descriptor with it. The worker
sends it the class and the hardware before it constructs an instance; the stopper imports the class, and answers. From
then on it reads a pipe of which only the watchdog has the other end. So stop_hardware also runs when the watchdog is
killed. The kernel ends it when its time is up (SIGALRM), also if no other process is left.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import msgspec

from rlinf_actors import procfs
from rlinf_actors.errors import WorkerStartError
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.worker.user_class import load_class

NAME = "rlinf-stopper"
"""Name of the process, by which a template that sweeps up after a killed watchdog leaves it alone."""
STOP, NO_STOP = b"!", b"."
"""What the watchdog writes into the pipe when the worker has ended: run stop_hardware, or end."""
SWEEP_S = 0.05
"""Seconds that a template has to kill what a killed watchdog has left, before stop_hardware runs. No event tells."""
_DEATH = signal.SIGURG  # sent when the worker is killed because the watchdog has ended; has no effect elsewhere
MORE_S = 0.2
"""Seconds after STOP_HARDWARE_S in which the process can end."""


def run(prepare: Callable[[], None], asked: socket.socket, waits: int) -> NoReturn:
    """Be the stopper of a worker. *prepare* sets this process up as the worker is set up, without its marks.

    *asked* is the connection to the worker. stop_hardware runs when STOP, or the end, comes from the pipe *waits*.
    """
    watchdog = os.getppid()
    try:
        prepare()
        signal.pthread_sigmask(signal.SIG_BLOCK, [_DEATH])
        procfs.die_with_parent(_DEATH, watchdog)
        procfs.set_name(NAME)
        procfs.set_title(f"{NAME} of {os.environ.get('WORKER_NAME', '')}")
        stop = _await_class(asked)
        order = os.read(waits, 1)
        if order != NO_STOP and stop is not None:
            if not order:  # the watchdog was killed: the kernel closes its end of the pipe before it kills the worker
                signal.sigtimedwait([_DEATH], packets.STOP_HARDWARE_S)
                time.sleep(SWEEP_S)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
            signal.setitimer(signal.ITIMER_REAL, packets.STOP_HARDWARE_S)
            stop()
    except BaseException:  # noqa: BLE001 - no caller: stderr is part of the exit report
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _await_class(asked: socket.socket) -> Callable[[], object] | None:
    """Import the class that the worker sends, and return the call of its stop_hardware.

    Return None if the worker has ended before, or if the class cannot be imported, which the worker is told.
    """
    with asked, asked.makefile("rb") as file:
        data = file.read()
        if not data:
            return None
        try:
            frame, parts = msgspec.msgpack.decode(data, type=tuple[frames.Create, list[bytes]])
            where = f"{sys.executable} on node {os.environ.get('CLUSTER_NODE_RANK', '')}"
            cls, _, _, infos = load_class(frame, payload.AuthenticatedParts(parts), where)
        except BaseException:  # noqa: BLE001 - the worker raises it
            asked.sendall(traceback.format_exc().encode())
            return None
    return partial(cls.stop_hardware, infos)


def give_class(fd: int, frame: frames.Create, cls: Any, infos: list[Any]) -> Callable[[], None]:
    """Send the class of this worker to its stopper. Return a function that waits until the stopper has imported it.

    *frame* is the owner's order to construct it, *infos* the hardware that stop_hardware gets. The function raises
    WorkerStartError if the stopper cannot run stop_hardware.
    """
    asking = socket.socket(fileno=fd)
    by_value = None if frame.cls else cls
    parts = [bytes(part) for part in payload.encode((by_value, (), {}, infos), "the class")]
    asking.sendall(msgspec.msgpack.encode((msgspec.structs.replace(frame, env={}), parts)))
    asking.shutdown(socket.SHUT_WR)

    def wait() -> None:
        with asking, asking.makefile("rb") as file:
            error = file.read().decode(errors="replace")
        if error:
            raise WorkerStartError(
                f"{cls.__name__}.stop_hardware() cannot run outside the worker, in a process that imports its class "
                f"for that alone: {error}"
            )

    return wait
