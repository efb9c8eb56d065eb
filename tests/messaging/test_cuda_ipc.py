"""CUDA's driver by ctypes, against a library that is written here."""

from __future__ import annotations

import ctypes

import pytest

from rlinf_actors.messaging import cuda_ipc
from rlinf_actors.messaging.cuda_ipc import CudaError, DeviceMemory, Driver


class Function:
    """A function of the library; ctypes' attributes can be set on it."""

    def __init__(self, body):
        self._body = body
        self.argtypes = None

    def __call__(self, *args):
        return self._body(*args) or 0


def _set(reference, value):
    reference._obj.value = value


def _fill(reference, data):
    ctypes.memmove(ctypes.addressof(reference._obj), data, len(data))


class Cuda:
    """One process's libcuda with one device; allocations are at multiples of 4096."""

    def __init__(self):
        self.calls = []
        self.current = []
        self.fails = {}
        bodies = {
            "cuInit": lambda flags: None,
            "cuDeviceGet": lambda device, index: _set(device, index),
            "cuDeviceGetUuid_v2": lambda found, device: _fill(found, bytes(range(16))),
            "cuDevicePrimaryCtxRetain": lambda context, device: _set(context, 77),
            "cuCtxPushCurrent_v2": lambda context: self.current.append(context.value),
            "cuCtxPopCurrent_v2": lambda before: _set(before, self.current.pop()),
            "cuMemGetAddressRange_v2": lambda base, size, pointer: _set(base, pointer.value // 4096 * 4096),
            "cuIpcGetMemHandle": lambda handle, base: (
                ctypes.memmove(ctypes.addressof(handle._obj), b"%-64d" % base.value, 64) and 0
            ),
            "cuIpcOpenMemHandle_v2": lambda pointer, handle, flags: _set(pointer, int(bytes(handle)) + (1 << 40)),
            "cuIpcCloseMemHandle": lambda pointer: None,
            "cuMemAlloc_v2": lambda pointer, size: _set(pointer, 8192),
            "cuMemFree_v2": lambda pointer: None,
            "cuCtxSynchronize": lambda: None,
            "cuGetErrorString": lambda code, text: _set(text, b"invalid argument"),
        }
        for name, body in bodies.items():
            setattr(self, name, Function(self._called(name, body)))

    def _called(self, name, body):
        def call(*args):
            self.calls.append((name, list(self.current)))
            return self.fails.get(name) or body(*args)

        return call


@pytest.fixture
def cuda():
    return Cuda()


@pytest.fixture
def driver(cuda):
    return Driver(cuda)


def test_a_handle_is_the_allocations_and_the_offset_the_pointers(driver):
    handle, offset = driver.export(0, 4096 * 5 + 24)
    assert (len(handle), offset) == (64, 24)
    assert driver.open(0, handle) == 4096 * 5 + (1 << 40)


def test_every_call_has_the_primary_context_and_leaves_none(driver, cuda):
    handle, _ = driver.export(0, 4096)
    driver.close(0, driver.open(0, handle))
    driver.free(0, driver.allocate(0, 100))
    driver.synchronize(0)
    inner = [now for name, now in cuda.calls if name in ("cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuMemFree_v2")]
    assert inner == [[77]] * 3
    assert cuda.current == []
    assert [name for name, _ in cuda.calls].count("cuDevicePrimaryCtxRetain") == 1


def test_a_failed_call_is_named_and_leaves_no_context(driver, cuda):
    cuda.fails["cuIpcGetMemHandle"] = 1
    with pytest.raises(CudaError, match="cuIpcGetMemHandle failed with 1: invalid argument"):
        driver.export(0, 4096)
    assert cuda.current == []


def test_a_device_has_a_stable_uuid(driver):
    assert driver.uuid(0) == bytes(range(16)).hex()


def test_the_end_of_memory_is_reported_once():
    ended = []
    memory = DeviceMemory(4096, 100, lambda: ended.append(1))
    assert memory.__cuda_array_interface__["data"] == (4096, False)
    assert memory.__cuda_array_interface__["shape"] == (100,)
    del memory
    assert ended == [1]


def test_the_address_of_a_device_is_its_gpus(driver, cuda):
    def address(found, size, device):
        found.value = b"0000:1B:00.0"

    cuda.cuDeviceGetPCIBusId = Function(address)
    assert driver.address(3) == "0000:1b:00.0"


@pytest.mark.parametrize(
    ("environ", "home", "own"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_ACCELERATOR_RANK": "1"}, 1, 1),
        ({"ISOLATE_ACCELERATOR": "1", "LOCAL_RANK": "0", "LOCAL_ACCELERATOR_RANK": "3"}, 0, 2),
        ({"LOCAL_RANK": "5", "LOCAL_ACCELERATOR_RANK": "-1"}, None, 0),
        ({"LOCAL_RANK": "0", "LOCAL_ACCELERATOR_RANK": "-1", "ISOLATE_ACCELERATOR": "0"}, None, 0),
    ],
)
def test_a_worker_without_an_accelerator_of_its_own_opens_none(environ, home, own, driver, cuda, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_count", lambda accelerator: 2)
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    monkeypatch.setattr(driver, "uuid", lambda index: f"uuid-{index}")
    devices = cuda_ipc.Devices({"ACCELERATOR_TYPE": "NV_GPU", **environ})
    assert devices.home == home
    assert len(devices.own) == own
    assert (devices.kind, devices.ccl) == (("cuda", "nccl") if own else ("cpu", ""))
    assert devices.accelerator.value == ("NV_GPU" if own else "NO_ACCEL"), "what senders choose the path by"
    if not own:
        assert devices.driver is None
