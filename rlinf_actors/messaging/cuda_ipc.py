"""Share device memory between processes by CUDA IPC, and describe the accelerators of this worker.

`Driver` calls libcuda by ctypes. torch's own reductions are not used: they count references in named shared memory,
which a killed process leaves behind, and they keep the memory of a dead receiver for ever. This runtime knows which
workers are gone.

The sender keeps its tensors until the receiver releases them or is gone. When a receiver drops opened memory, the
keeper thread closes the memory after the device has finished its work, because the thread that drops a tensor may have
started kernels that still read it.

Rule: every call makes the device's primary context, which torch uses too, current on the thread, and then restores the
thread's earlier context.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from rlinf_actors import exhaustion
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.messaging import process_groups
from rlinf_actors.messaging.routes import Ccl
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE, torch_platform
from rlinf_actors.model.hardware import AcceleratorType

HANDLE_BYTES = 64
"""sizeof(CUipcMemHandle), cuda.h."""
_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag of cuIpcOpenMemHandle."""


class CudaError(RlinfActorsError):
    """Raised if a call of CUDA's driver library has failed."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Driver:
    """The CUDA driver library (libcuda) in this process. Methods take the device as its index in this process.

    Args:
        library: the loaded library; None to load libcuda.so.1.

    Raises:
        OSError: the library is not installed.
        CudaError: the driver does not start, for example because there is no device.
    """

    def __init__(self, library: Any = None) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._lock = threading.Lock()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        self._do("cuInit", 0)

    def uuid(self, index: int) -> str:
        """Return the UUID of the device *index*, as 32 hexadecimal digits."""
        device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        self._do("cuDeviceGet", ctypes.byref(device), index)
        name = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._do(name, ctypes.byref(found), device)
        return bytes(found).hex()

    def address(self, index: int) -> str:
        """Return the PCI address of the device *index*. All parts of a divided GPU (MIG) have its address."""
        device, found = ctypes.c_int(), ctypes.create_string_buffer(32)
        self._do("cuDeviceGet", ctypes.byref(device), index)
        self._do("cuDeviceGetPCIBusId", found, len(found), device)
        return found.value.decode().lower()

    def export(self, index: int, pointer: int) -> tuple[bytes, int]:
        """Return the IPC handle of the allocation that holds *pointer*, and the offset of *pointer* in the allocation.

        Raises:
            CudaError: the allocation cannot be exported: it belongs to another process, or to a virtual memory pool
                (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
        """
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._current(index):
            self._do("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
            self._do("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), pointer - base.value

    def open(self, index: int, handle: bytes) -> int:
        """Open another process's allocation and return its address here. Each `open` needs one `close`."""
        pointer, opened = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(opened), handle, HANDLE_BYTES)
        with self._current(index):
            self._do("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, _LAZY_PEER_ACCESS)
        return pointer.value

    def close(self, index: int, pointer: int) -> None:
        with self._current(index):
            self._do("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def allocate(self, index: int, size: int) -> int:
        """Allocate *size* bytes of device memory that other processes can open. Return the address, for `free`."""
        pointer = ctypes.c_uint64()
        with self._current(index):
            self._do("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, index: int, pointer: int) -> None:
        with self._current(index):
            self._do("cuMemFree_v2", ctypes.c_uint64(pointer))

    def synchronize(self, index: int) -> None:
        """Wait until the device has finished the work of all streams of this process."""
        with self._current(index):
            self._do("cuCtxSynchronize")

    @contextmanager
    def _current(self, index: int) -> Iterator[None]:
        with self._lock:
            context = self._contexts.get(index)
            if context is None:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._do("cuDeviceGet", ctypes.byref(device), index)
                self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[index] = context
        self._do("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            before = ctypes.c_void_p()
            self._do("cuCtxPopCurrent_v2", ctypes.byref(before))

    def _do(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"CUDA's {name} failed with {code}: {(text.value or b'unknown error').decode()}")


class DeviceMemory:
    """Device memory that torch did not allocate. ``torch.as_tensor`` of this object is a tensor that keeps it alive.

    *ended* is called when the last tensor on the memory is gone; on any thread, with any lock held.
    """

    def __init__(self, pointer: int, size: int, ended: Any) -> None:
        # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip
        self._ended = ended

    def __del__(self) -> None:
        self._ended()


log = logging.getLogger(__name__)


class MemoryLease:
    """The receiver's right to use the sender's memory of one message. The opened memory keeps the lease alive.

    *ended* is called once, on any thread, when all of that memory is closed; it tells the sender.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __del__(self) -> None:
        self._ended()


def export(driver: Driver, tensor: Any) -> tuple[bytes, int, Any]:
    """Return the IPC handle and offset of a contiguous tensor, and the tensor to keep until the receiver releases it.

    Memory that cannot be exported (another worker's, or of an expandable segment) is first copied on the device, on the
    current stream, into memory that can be exported; the tensor to keep is then the copy.
    """
    import torch

    index, size = tensor.device.index, tensor.numel() * tensor.element_size()
    try:
        return (*driver.export(index, tensor.data_ptr()), tensor)
    except CudaError:
        pointer = driver.allocate(index, size)

        def free() -> None:
            _keeper().put((driver, index, lambda: driver.free(index, pointer), None))

        copy = torch.as_tensor(DeviceMemory(pointer, size, free), device=tensor.device)
        copy.copy_(tensor.detach().view(-1).view(torch.uint8))
        return (*driver.export(index, pointer), copy)


def opened(driver: Driver, index: int, handle: bytes, offset: int, size: int, lease: MemoryLease) -> Any:
    """Open another process's memory as a uint8 tensor of *size* bytes on device *index*; the tensor keeps *lease*.

    Raises:
        CudaError: the memory cannot be opened: its owner is gone, or is in another container.
    """
    import torch

    base = driver.open(index, handle)

    def close() -> None:
        _keeper().put((driver, index, lambda: driver.close(index, base), lease))

    return torch.as_tensor(DeviceMemory(base + offset, size, close), device=f"cuda:{index}")


def event(index: int) -> Any:
    """Record a CUDA event on the current stream of device *index*, and return the event.

    Other processes can wait for it.
    """
    import torch

    kind: Any = torch.cuda.Event
    made = kind(interprocess=True)
    made.record(torch.cuda.current_stream(index))
    return made


def wait_for(index: int, handle: bytes) -> None:
    """Make the current stream of device *index* wait for a CUDA event of another process.

    *handle* is the IPC handle of the event. The calling thread does not wait.
    """
    import torch

    kind: Any = torch.cuda.Event
    remote = kind.from_ipc_handle(torch.device("cuda", index), handle)
    remote.wait(torch.cuda.current_stream(index))


class IpcProbe:
    """A small allocation and an event. A receiver tries to open both (`can_open`), to find out if CUDA IPC works.

    Attributes:
        memory, event: IPC handles of the allocation and the event, as sent in frames.Ask.

    Raises:
        CudaError, RuntimeError: the allocation or the event cannot be made or exported.
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
        """Free the probe's memory on the keeper thread. Does not wait."""
        driver, (index, pointer) = self._driver, self._memory
        _keeper().put((driver, index, lambda: driver.free(index, pointer), None))


def can_open(driver: Driver, index: int, memory: bytes, event_handle: bytes) -> bool:
    """Return True if this process can open the memory and the event of another process's `IpcProbe`."""
    try:
        driver.close(index, driver.open(index, memory))
        wait_for(index, event_handle)
    except (CudaError, RuntimeError) as error:
        log.warning("device memory cannot be shared with another worker on the device, and is copied: %s", error)
        return False
    return True


@lru_cache(maxsize=1)
def _keeper() -> queue.SimpleQueue[Any]:
    """Return the queue from which the keeper thread takes opened memory to close. The first call starts the thread.

    An entry is (driver, device index, function that closes the memory, lease to drop after that). A finalizer may add
    one.
    """
    dropped: queue.SimpleQueue[Any] = queue.SimpleQueue()
    exhaustion.start(exhaustion.OwnThread(target=_keep, args=(dropped,), name="rlinf-actors-ipc-keeper", daemon=True))
    return dropped


def _keep(dropped: queue.SimpleQueue[Any]) -> None:
    while True:
        driver, index, close, lease = dropped.get()
        try:
            driver.synchronize(index)
            close()
        except CudaError as error:
            log.warning("device memory of another worker could not be closed: %s", error)
        del close, lease  # the end of the lease tells the sender


class Devices:
    """The accelerators of one worker.

    Args:
        environ: the worker's environment; ACCELERATOR_TYPE, ISOLATE_ACCELERATOR and LOCAL_RANK name its accelerators.
            If LOCAL_ACCELERATOR_RANK is -1, the worker sees accelerators and none is its own: it then counts as a
            worker without accelerators, and opens no context on those of other workers.

    Attributes:
        accelerator: type of the accelerators; NO_ACCEL without accelerators, so that senders choose no CCL's lane.
        kind: torch's device type; "cpu" without accelerators.
        ccl: torch.distributed's back-end for the accelerators; "" without accelerators.
        seen: index by UUID of all accelerators that the process sees; by "kind:number" if `driver` is None.
        own: the accelerators in `seen` that this worker computes on: all if ISOLATE_ACCELERATOR is 1, else only `home`.
        home: index of the accelerator on which tensors arrive; None without accelerators.
        backends: back-ends of torch.distributed in this process.
        driver: the CUDA driver; None if device memory cannot be shared between processes.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.accelerator = AcceleratorType.named(environ.get("ACCELERATOR_TYPE") or "NO_ACCEL")
        # torch has no devices of a type that no package here has registered
        facts = ACCELERATOR_TABLE.get(self.accelerator, ACCELERATOR_TABLE[AcceleratorType.NO_ACCEL])
        self.kind, self.ccl = facts.torch_device_type, facts.ccl
        self.seen: dict[str, int] = {}
        self.own: dict[str, int] = {}
        self.home: int | None = None
        self.driver: Driver | None = None
        isolated = environ.get("ISOLATE_ACCELERATOR") == "1"
        has_own = isolated or environ.get("LOCAL_ACCELERATOR_RANK") != "-1"
        count = _count(self.accelerator) if self.kind != "cpu" and has_own else 0
        self.backends = process_groups.backends(facts.ccl_plugin if count else "")
        if not count:
            self.accelerator, self.kind, self.ccl = AcceleratorType.NO_ACCEL, "cpu", ""
            return
        if facts.cuda_ipc:
            self.driver = _driver()
        numbers = dict(enumerate(filter(None, environ.get("VISIBLE_DEVICES", "").split(","))))
        for index in range(count):
            number = f"{self.kind}:{numbers.get(index, index)}"
            self.seen[number if self.driver is None else self.driver.uuid(index)] = index
        first = 0 if isolated else min(int(environ.get("LOCAL_RANK") or 0), count - 1)
        self.own = {uuid: index for uuid, index in self.seen.items() if isolated or index == first}
        self.home = first

    def ccl_facts(self, index: int | None) -> Ccl:
        """Return what the other end of a lane must know of the device *index*, which may be None for none."""
        if index is None or self.kind == "cpu":
            return Ccl()
        version = model = address = ""
        with contextlib.suppress(ImportError, AttributeError, RuntimeError):  # torch or its build does not say it
            module = torch_platform(self.accelerator)
            model = str(module.get_device_name(index))
            if self.ccl == "nccl":
                version = ".".join(map(str, module.nccl.version()))
        with contextlib.suppress(CudaError, AttributeError):
            address = "" if self.driver is None else self.driver.address(index)
        return Ccl(version, model, address)

    def uuid(self, index: int) -> str:
        """Return the key in `seen` of device *index*, "" if the process sees no such device."""
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
        return None  # torch finds devices, but their memory cannot be shared


class LazyDevices:
    """The `Devices` of this process, made on first use, which may load torch and start CUDA."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._made: Devices | None = None

    def get(self) -> Devices:
        """Return the accelerators of this process.

        The first call takes about a second, so it must not run on the loop thread.
        """
        with self._lock:
            if self._made is None:
                self._made = Devices(self._environ)
            return self._made
