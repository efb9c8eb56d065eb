"""Map CUDA devices to EGL devices. Renderers, such as MuJoCo, choose a GPU by its EGL device index.

CUDA and EGL number GPUs in different orders, and EGL also counts the GPUs of other containers. The probe runs this file
as a program, with a time limit, because a vendor's libraries may hang. It imports only the standard library.
"""

from __future__ import annotations

import ctypes

_LIBRARY = "libEGL.so.1"
_CUDA_DEVICE = 0x323A
"""EGL_CUDA_DEVICE_NV, of the extension EGL_NV_device_cuda."""
_MOST = 64


def egl_indices() -> dict[int, int]:
    """Return the EGL device index of each CUDA device that this process sees, by the device's CUDA ordinal.

    The ordinal is the position of the device in CUDA_VISIBLE_DEVICES, or its index if the variable is not set. Loads
    the vendor's EGL library into this process.

    Raises:
        OSError: there is no EGL library.
        RuntimeError: the library does not list devices.
    """
    library = ctypes.CDLL(_LIBRARY)
    library.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    library.eglGetProcAddress.restype = ctypes.c_void_p
    list_devices = _function(library, "eglQueryDevicesEXT", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    attribute = _function(library, "eglQueryDeviceAttribEXT", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    devices, count = (ctypes.c_void_p * _MOST)(), ctypes.c_int()
    if not list_devices(_MOST, ctypes.byref(devices), ctypes.byref(count)):
        raise RuntimeError("eglQueryDevicesEXT fails")
    found: dict[int, int] = {}
    for index in range(count.value):
        ordinal = ctypes.c_ssize_t(-1)  # EGLAttrib
        if attribute(devices[index], _CUDA_DEVICE, ctypes.byref(ordinal)) and ordinal.value >= 0:
            found[ordinal.value] = index
    return found


def _function(library: ctypes.CDLL, name: str, *kinds: type) -> ctypes._FuncPointer:
    address = library.eglGetProcAddress(name.encode())
    if not address:
        raise RuntimeError(f"{_LIBRARY} has no {name}")
    return ctypes.CFUNCTYPE(ctypes.c_uint, *kinds)(address)


def parse(text: str) -> dict[int, int]:
    """Return what the program printed: EGL device indices by CUDA ordinal. Other lines are skipped."""
    lines = (line.split() for line in text.splitlines())
    return {int(line[0]): int(line[1]) for line in lines if len(line) == 2 and all(map(str.isdecimal, line))}


if __name__ == "__main__":
    for ordinal, index in egl_indices().items():
        print(ordinal, index)  # noqa: T201 - the probe reads it
