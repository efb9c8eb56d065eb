"""The capture window of a GPU profiler (nsys, rocprof-sys) in this process, and the ranges that it shows.

A profiler that runs a worker with steps records only between `start` and `stop`, which call torch.cuda.profiler. Torch
is imported only then. Accelerators without such a profiler do nothing here. Any thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

from rlinf_actors.model.accelerator_table import torch_platform
from rlinf_actors.model.hardware import AcceleratorType

log = logging.getLogger(__name__)


def _cuda() -> Any:
    return torch_platform(AcceleratorType.NV_GPU)  # AMD's too


class CudaProfiler:
    """The capture window of this process, for accelerators that torch.cuda drives (NVIDIA, AMD).

    Args:
        state: returns the mapping that has the state of the window.
        key: key of that state, True while the window is open.
    """

    def __init__(self, state: Callable[[], MutableMapping[str, Any]] | None = None, key: str = "active") -> None:
        own: dict[str, Any] = {}
        self._state = state or (lambda: own)
        self._key = key

    @property
    def active(self) -> bool:
        """True while the window is open."""
        return bool(self._state().get(self._key))

    def start(self, step_idx: int | None = None) -> None:
        """Open the capture window; without effect while it is open. *step_idx* is a training step, for the log."""
        if self.active:
            return
        _cuda().profiler.start()
        self._state()[self._key] = True
        if step_idx is not None:
            log.info("the profiler records from step %d", step_idx)

    def stop(self) -> None:
        """Close the capture window; without effect while it is closed."""
        if not self.active:
            return
        self._state()[self._key] = False
        _cuda().profiler.stop()

    @contextlib.contextmanager
    def range(self, label: str) -> Iterator[None]:
        """Show the ``with`` block in the profile as a range named *label*, if the window is open when it starts."""
        if not self.active:
            yield
            return
        nvtx = _cuda().nvtx
        nvtx.range_push(label)
        try:
            yield
        finally:
            nvtx.range_pop()


_profilers = {AcceleratorType.NV_GPU: CudaProfiler(), AcceleratorType.AMD_GPU: CudaProfiler()}
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def profiler_of(accelerator_type: AcceleratorType | str) -> CudaProfiler | None:
    """Return the capture window for an accelerator type, None if the type has no profiler."""
    return _profilers.get(AcceleratorType.named(accelerator_type))


def replace_profiler(accelerator_type: AcceleratorType, profiler: CudaProfiler) -> None:
    """Use *profiler* for an accelerator type from now on, for programs that keep its state in a place of their own."""
    _profilers[accelerator_type] = profiler


def profiling_range(accelerator_type: AcceleratorType | str, label: str) -> AbstractContextManager[None]:
    """Return a context manager that shows its block as a range named *label* in the profile of this process."""
    profiler = profiler_of(accelerator_type)
    return profiler.range(label) if profiler is not None and profiler.active else _NOTHING
