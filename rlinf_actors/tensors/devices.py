"""This worker's accelerators, as torch has them, and what its end of a path can be. Any thread; looked up once."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from rlinf_actors.errors import UsageError
from rlinf_actors.hardware.torch_platform import torch_platform
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.tensors import groups
from rlinf_actors.tensors.cuda import CudaError, Driver


class Devices:
    """Accelerators of one worker.

    Args:
        environ: of the worker: ACCELERATOR_TYPE, ISOLATE_ACCELERATOR and LOCAL_RANK say which are its own.

    Attributes:
        kind: torch's type of them; "cpu" without.
        ccl: torch.distributed's back-end for them, "" without.
        own: UUID to index of the worker's own; where a UUID is not known, its number on the node stands for it.
        seen: the same of all that the process sees.
        home: index of the one that tensors arrive on, None without.
        backends: of torch.distributed here.
        driver: CUDA's, None where device memory cannot be shared between processes.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.accelerator = AcceleratorType.named(environ.get("ACCELERATOR_TYPE") or "NO_ACCEL")
        # a type that no package has registered here is one that torch has no device of
        facts = ACCELERATOR_TABLE.get(self.accelerator, ACCELERATOR_TABLE[AcceleratorType.NO_ACCEL])
        self.kind, self.ccl = facts.torch_device_type, facts.ccl
        self.seen: dict[str, int] = {}
        self.own: dict[str, int] = {}
        self.home: int | None = None
        self.driver: Driver | None = None
        count = _count(self.accelerator) if self.kind != "cpu" else 0
        self.backends = groups.backends(facts.ccl_plugin if count else "")
        if not count:
            self.kind, self.ccl = "cpu", ""
            return
        if facts.cuda_ipc:
            self.driver = _driver()
        numbers = dict(enumerate(filter(None, environ.get("VISIBLE_DEVICES", "").split(","))))
        for index in range(count):
            number = f"{self.kind}:{numbers.get(index, index)}"
            self.seen[number if self.driver is None else self.driver.uuid(index)] = index
        isolated = environ.get("ISOLATE_ACCELERATOR") == "1"
        first = 0 if isolated else min(int(environ.get("LOCAL_RANK") or 0), count - 1)
        self.own = {uuid: index for uuid, index in self.seen.items() if isolated or index == first}
        self.home = first

    def uuid(self, index: int) -> str:
        """UUID of a device that this process sees, "" of one that is not the kind of this worker's."""
        return next((uuid for uuid, known in self.seen.items() if known == index), "")


def _count(accelerator: AcceleratorType) -> int:
    try:
        module = torch_platform(accelerator)
    except (ImportError, UsageError):
        return 0
    return int(module.device_count()) if module.is_available() else 0


def _driver() -> Driver | None:
    try:
        return Driver()
    except (OSError, CudaError):
        return None  # torch has found devices: they are there, and cannot be shared


class LazyDevices:
    """`Devices` of this process, made when they are first asked for: that may load torch and start CUDA.

    Args:
        environ: see Devices.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._made: Devices | None = None

    def get(self) -> Devices:
        """The devices. Takes a second the first time; not on the loop's thread."""
        with self._lock:
            if self._made is None:
                self._made = Devices(self._environ)
            return self._made
