"""The context of a worker process or child member: its address, its runtime, and the server that peers connect to.

`worker.main` (in a worker) and `worker.children` (in a child member) make it (`worker.opening`), and install it before
any code of the user's class runs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from rlinf_actors import forks
from rlinf_actors.cluster.connect import WorkerJob, set_worker_job
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.settings import log_level
from rlinf_actors.wire.values import Endpoint, WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.messaging.broadcaster import Broadcaster
    from rlinf_actors.messaging.messenger import Messenger
    from rlinf_actors.runtime.runtime import Runtime
    from rlinf_actors.wire.template_protocol import WorkerPlace
    from rlinf_actors.worker.worker_server import WorkerServer

    _StreamHandler = logging.StreamHandler[TextIO]
    from rlinf_actors.worker.children import Children
    from rlinf_actors.worker.device_lock import DeviceLock
    from rlinf_actors.worker.lease_guard import Guard, LeasePage
else:
    _StreamHandler = logging.StreamHandler  # no type arguments before Python 3.11


class WorkerContext(msgspec.Struct):
    """What the library keeps about this worker process or child member, for `Worker` and its base classes.

    In a child member, *spec* is a copy of the worker's spec with the child's own id and world size.
    """

    address: WorkerAddress
    spec: WorkerSpec
    place: WorkerPlace
    runtime: Runtime
    job: WorkerJob
    endpoint: Endpoint  # where the server listens
    messenger: Messenger
    broadcaster: Broadcaster
    server: WorkerServer
    extras: dict[str, Any]  # values that the owner sent with the class, such as hardware_infos
    environ: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(os.environ))  # before user code changes it
    ports: HeldPorts = msgspec.field(default_factory=HeldPorts)
    made_in: int = msgspec.field(default_factory=lambda: forks.generation)  # a forked process inherits the context
    device_lock: DeviceLock | None = None  # None in a child
    guard: Guard | None = None  # of a robot worker
    children: Children | None = None  # None in a child
    lease_page: LeasePage | None = None  # in a worker without robots None until user code asks for it
    connection: socket.socket | None = None  # of a child to its worker

    @property
    def tcp_port(self) -> int:
        """Port of the TCP socket on which this worker listens; 0 if it listens on none."""
        return int(self.endpoint.tcp.rpartition(":")[2] or 0)

    @property
    def is_child(self) -> bool:
        return len(self.address.rank_path) > 1

    @property
    def is_here(self) -> bool:
        """True in the worker or child member itself, False in a process that was forked from it."""
        return self.made_in == forks.generation


def accelerator_type(environ: Mapping[str, str]) -> AcceleratorType:
    """Return the accelerator type that a worker's environment names, NO_ACCEL if there is none."""
    return AcceleratorType.named(environ.get("ACCELERATOR_TYPE") or "NO_ACCEL")


_current: WorkerContext | None = None


def install(context: WorkerContext) -> None:
    """Make *context* the context of this process, which `current` returns.

    Called once, in a worker or a child member.
    """
    global _current
    _current = context
    set_worker_job(context.job)
    driver_logger()  # code that came from the driver may use it


def current() -> WorkerContext | None:
    """Return the context of this process or of the worker that it was forked from, None in a driver."""
    return _current


_FORMAT = "[%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"


def make_logger(name: str) -> logging.Logger:
    """Return the logger of the worker *name*. It writes to stderr, at the level of RLINF_LOG_LEVEL.

    The root logger gets none of its messages.
    """
    logger = logging.getLogger(f"rlinf_actors.worker.{name}")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
        _set_level(logger)
    return logger


def driver_logger() -> logging.Logger:
    """Return the logger that `Worker.logger` is in a driver. Its level is that of RLINF_LOG_LEVEL.

    The root logger gets its messages. While the program has not configured the root logger, they go to stderr.
    """
    logger = logging.getLogger("rlinf_actors.driver")
    if not logger.handlers:
        handler = _UnlessConfigured(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        _set_level(logger)
    return logger


class _UnlessConfigured(_StreamHandler):
    """Writes a message only if the root logger has no handler, so that no message is written twice."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


def _set_level(logger: logging.Logger) -> None:
    try:
        logger.setLevel(log_level(os.environ))
    except ConfigError as error:  # set by the node: the driver and launch() check their own
        logger.setLevel("INFO")
        logger.warning("%s; the level is INFO", error)
