"""What CUDA's driver can do between processes, by ctypes: open another's device memory, name a device for good.

Not torch's own reductions: those count references in named shared memory, which a killed process leaves
behind, and keep a dead receiver's memory for ever. Here the runtime knows who is gone.

House rule: every call makes the device's primary context, which torch uses too, current on the thread
first, and the one before it again afterwards.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlinf_actors.errors import RlinfActorsError

HANDLE_BYTES = 64
"""sizeof(CUipcMemHandle), cuda.h."""
_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is."""


class CudaError(RlinfActorsError):
    """CUDA's driver refused something."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Driver:
    """libcuda of this process.

    Args:
        library: the loaded library; default: libcuda.so.1.

    Raises:
        OSError: there is none.
        CudaError: it does not start (no device, wrong version).
    """

    def __init__(self, library: Any = None) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._lock = threading.Lock()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        self._do("cuInit", 0)

    def uuid(self, index: int) -> str:
        """The UUID of device *index* of this process, as 32 hexadecimal digits."""
        device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        self._do("cuDeviceGet", ctypes.byref(device), index)
        name = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._do(name, ctypes.byref(found), device)
        return bytes(found).hex()

    def export(self, index: int, pointer: int) -> tuple[bytes, int]:
        """The handle of the allocation that holds *pointer*, and the offset in it.

        Raises:
            CudaError: it cannot be exported: it is itself another process's, or of a virtual memory pool
                (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
        """
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._current(index):
            self._do("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
            self._do("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), pointer - base.value

    def open(self, index: int, handle: bytes) -> int:
        """Where the allocation of another process is in this one. To be closed as often as it was opened."""
        pointer, opened = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(opened), handle, HANDLE_BYTES)
        with self._current(index):
            self._do("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, _LAZY_PEER_ACCESS)
        return pointer.value

    def close(self, index: int, pointer: int) -> None:
        """Undo one `open`."""
        with self._current(index):
            self._do("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def allocate(self, index: int, size: int) -> int:
        """Memory that can be exported, of *size* bytes."""
        pointer = ctypes.c_uint64()
        with self._current(index):
            self._do("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, index: int, pointer: int) -> None:
        """Give back what `allocate` gave."""
        with self._current(index):
            self._do("cuMemFree_v2", ctypes.c_uint64(pointer))

    def drain(self, index: int) -> None:
        """Wait until the device has done what it was given so far, by any stream of this process."""
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


class Memory:
    """Device memory that is not torch's, for ``torch.as_tensor``: the tensor keeps this, and its end ends that.

    Args:
        pointer, size: where it is, in bytes.
        ended: called with nothing when the last tensor on it is gone; on any thread, with any lock held.
    """

    def __init__(self, pointer: int, size: int, ended: Any) -> None:
        # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip
        self._ended = ended

    def __del__(self) -> None:
        self._ended()
