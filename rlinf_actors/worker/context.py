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
from rlinf_actors.settings import log_format, log_level
from rlinf_actors.wire.values import Endpoint, WorkerSpec
from rlinf_actors.worker.log_format import TEXT, JsonFormatter

if TYPE_CHECKING:
    from rlinf_actors.messaging.broadcaster import Broadcaster
    from rlinf_actors.messaging.messenger import Messenger
    from rlinf_actors.runtime.runtime import Runtime
    from rlinf_actors.wire.template_protocol import WorkerPlace
    from rlinf_actors.worker.worker_server import WorkerServer

    _StreamHandler = logging.StreamHandler[TextIO]
    from rlinf_actors.worker.children import Children
    from rlinf_actors.worker.device_lock import DeviceLock
    from rlinf_actors.worker.lease_guard import Guard
    from rlinf_actors.worker.leasepage import LeasePage
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
    constructing: type | None = None  # the user's class, until the runtime has made its object
    instance: Any = None  # that object; the user's code may make more of the class
    children: Children | None = None  # None in a child
    lease_page: LeasePage | None = None  # in a worker without robots None until user code asks for it
    connection: socket.socket | None = None  # of a child to its worker

    def take(self, extras: dict[str, Any]) -> None:
        """Store what the owner sent with the class. Its robots are those of the groups that this process launches."""
        self.extras.update(extras)
        self.runtime.hardware_infos = [
            *extras.get("hardware_infos", {}).get(self.spec.rank, []),
            *extras.get("inherited_infos", []),
        ]

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


def make_logger(name: str) -> logging.Logger:
    """Return the logger of the worker *name*, at the level of RLINF_LOG_LEVEL unless the program has set one.

    Its messages go to the handlers that the program has installed, on this logger or on those above. If there is none,
    they go to stderr, in the format of RLINF_ACTORS_LOG_FORMAT.
    """
    return _own_logger(f"rlinf_actors.worker.{name}")


def driver_logger() -> logging.Logger:
    """Return the logger that `Worker.logger` is in a driver. Level, handlers and format are as in `make_logger`."""
    return _own_logger("rlinf_actors.driver")


def _own_logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    if type(logger) is logging.Logger:
        logger.__class__ = _NeverDisabled
    if any(isinstance(handler, _UnlessConfigured) for handler in logger.handlers):
        return logger
    wrong: ConfigError | None = None
    try:
        level, is_json = log_level(os.environ), log_format(os.environ) == "json"
    except ConfigError as error:  # set by the node: the driver and launch() check their own
        level, is_json, wrong = "INFO", False, error
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    handler = _UnlessConfigured(logger)
    handler.setFormatter(JsonFormatter(_origin) if is_json else logging.Formatter(TEXT))
    logger.addHandler(handler)
    if wrong is not None:
        logger.warning("%s; the level is INFO, the format text", wrong)
    return logger


def _origin() -> dict[str, object]:
    """Return whose log this process writes, for JsonFormatter."""
    context = _current
    if context is None:
        return {"group": "", "rank": None, "node": "", "job": ""}
    spec = context.spec
    return {"group": spec.group, "rank": spec.rank, "node": context.place.node, "job": spec.namespace}


class _NeverDisabled(logging.Logger):
    """A logger that logging.config does not disable: `dictConfig` disables each logger that it does not name."""

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        """Change nothing."""


class _UnlessConfigured(_StreamHandler):
    """Writes messages of *logger* to stderr, unless the program has installed a handler that gets them: no message is
    written twice.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(sys.stderr)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        above: logging.Logger | None = self._logger
        while above is not None:
            if any(handler is not self for handler in above.handlers):
                return
            above = above.parent if above.propagate else None
        super().emit(record)
