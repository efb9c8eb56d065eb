"""Device memory handed from one worker to another on the same device: opened there, not copied.

The sender keeps its tensors until the receiver says that it dropped them, or is gone. What is dropped
goes to one thread, the keeper, which waits until the device has done what it was given and closes the
memory: who drops a tensor may have kernels under way that read it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rlinf_actors import scarce
from rlinf_actors.tensors.cuda import CudaError, Driver, Memory

log = logging.getLogger(__name__)


class Ticket:
    """The receiver's right to a message's memory; its end is told to the sender, once all of it was closed.

    Args:
        ended: tells; called once, on any thread.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __del__(self) -> None:
        self._ended()


def export(driver: Driver, tensor: Any) -> tuple[bytes, int, Any]:
    """A contiguous tensor as (handle, offset, what is to be kept until it is released).

    One that cannot be exported as it is (another worker's, or of an expandable segment) is copied on the
    device, on the current stream, into memory that can.
    """
    import torch

    index, size = tensor.device.index, tensor.numel() * tensor.element_size()
    try:
        return (*driver.export(index, tensor.data_ptr()), tensor)
    except CudaError:
        pointer = driver.allocate(index, size)

        def free() -> None:
            _keeper().put((driver, index, lambda: driver.free(index, pointer), None))

        copy = torch.as_tensor(Memory(pointer, size, free), device=tensor.device)
        copy.copy_(tensor.detach().view(-1).view(torch.uint8))
        return (*driver.export(index, pointer), copy)


def opened(driver: Driver, index: int, handle: bytes, offset: int, size: int, ticket: Ticket) -> Any:
    """Another process's memory as a uint8 tensor of *size* elements on device *index*.

    Raises:
        CudaError: it cannot be opened: its owner is gone, or may not be seen from here.
    """
    import torch

    base = driver.open(index, handle)

    def close() -> None:
        _keeper().put((driver, index, lambda: driver.close(index, base), ticket))

    return torch.as_tensor(Memory(base + offset, size, close), device=f"cuda:{index}")


def event(index: int) -> Any:
    """A CUDA event, to be opened elsewhere, of what the current stream of device *index* was given so far."""
    import torch

    kind: Any = torch.cuda.Event
    made = kind(interprocess=True)
    made.record(torch.cuda.current_stream(index))
    return made


def wait_for(index: int, handle: bytes) -> None:
    """Let the current stream of device *index* wait for another process's event; the thread does not."""
    import torch

    kind: Any = torch.cuda.Event
    theirs = kind.from_ipc_handle(torch.device("cuda", index), handle)
    theirs.wait(torch.cuda.current_stream(index))


class Probe:
    """A little device memory and an event, for a receiver to try to open; in a container, say, it may not.

    Raises:
        CudaError, RuntimeError: they cannot be made, or not be exported.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self._event = event(index)
        self.event = bytes(self._event.ipc_handle())
        self._driver = driver
        self._memory = (index, driver.allocate(index, 4096))
        try:
            self.memory, _ = driver.export(*self._memory)
        except CudaError:
            self.close()
            raise

    def close(self) -> None:
        """It was tried, or will not be. Does not wait."""
        driver, (index, pointer) = self._driver, self._memory
        _keeper().put((driver, index, lambda: driver.free(index, pointer), None))


def tried(driver: Driver, index: int, memory: bytes, event_handle: bytes) -> bool:
    """Whether a `Probe` of another process can be opened here."""
    try:
        driver.close(index, driver.open(index, memory))
        wait_for(index, event_handle)
    except (CudaError, RuntimeError) as error:
        log.warning("device memory cannot be shared with another worker on the device, and is copied: %s", error)
        return False
    return True


@lru_cache(maxsize=1)
def _keeper() -> queue.SimpleQueue[Any]:
    """Where what was dropped goes: (driver, index, how to close it, its ticket). Put from finalizers."""
    dropped: queue.SimpleQueue[Any] = queue.SimpleQueue()
    scarce.start(threading.Thread(target=_keep, args=(dropped,), name="rlinf-actors-ipc-keeper", daemon=True))
    return dropped


def _keep(dropped: queue.SimpleQueue[Any]) -> None:
    while True:
        driver, index, close, ticket = dropped.get()
        try:
            driver.drain(index)
            close()
        except CudaError as error:
            log.warning("device memory of another worker could not be closed: %s", error)
        del close, ticket  # now the sender is told
