"""Pure parts of the probe: reports as messages, visibility lists, how a child's end reads, accelerator facts."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.hardware.accelerators import AcceleratorUtil
from rlinf_actors.hardware.probe import ChildEnd, read_answer
from rlinf_actors.hardware.probe_report import ReportedInfo, resource_from_report, resource_to_report
from rlinf_actors.hardware.vendors.catalog import Vendor
from rlinf_actors.hardware.visibility import selected_devices, visible_devices
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType, HardwareResource
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.values import HardwareReport, NodeReport, ResourceReport

GPUS = [AcceleratorInfo("NV_GPU", "H100", index=index, uuid=f"GPU-{index}abc") for index in range(3)]


def test_accelerators_travel_whole() -> None:
    resource = HardwareResource(
        "NV_GPU", [AcceleratorInfo("NV_GPU", "H100", 3, "GPU-3", "0000:17:00.0", 80 << 30, 1, 5, 40)]
    )
    assert resource_from_report(resource_to_report(resource)) == resource


def test_a_field_of_a_newer_agent_is_left_out() -> None:
    report = ResourceReport("NV_GPU", [HardwareReport("NV_GPU", "H100", {"index": 1, "clock": 5})])
    assert resource_from_report(report).infos == [AcceleratorInfo("NV_GPU", "H100", index=1)]


def test_other_hardware_travels_as_plain_values() -> None:
    report = ResourceReport("Arm", [HardwareReport("Arm", "v2", {"ip": "10.0.0.1", "serials": ["7"]})])
    node = NodeReport("n", "n", "10.0.0.1", "h", 1, 1, "3.11", "/usr/bin/python", resources=[report])
    assert control_codec.msgspec.msgpack.decode(control_codec.msgspec.msgpack.encode(node), type=NodeReport) == node
    assert resource_from_report(report).infos == [ReportedInfo("Arm", "v2", {"ip": "10.0.0.1", "serials": ["7"]})]


@pytest.mark.parametrize(
    ("value", "indices", "faults"),
    [
        (None, [0, 1, 2], []),
        ("", [], []),
        ("1", [1], []),
        (" 2 , 0 ", [2, 0], []),
        ("GPU-1abc,GPU-0", [1, 0], []),
        ("-1", [], []),
        ("1,NoDevFiles,0", [1], []),
        ("1,5", [1], ["V=1,5 names 5, which no device that can be read has"]),
        ("GPU-", [], ["V=GPU- names GPU-, which 3 devices have"]),
        ("MIG-1,0", [0], ["V=MIG-1,0 names MIG-1, which no device that can be read has"]),
        ("1,GPU-1abc", [1], ["V=1,GPU-1abc names device 1 twice; it counts once"]),
    ],
)
def test_visible_devices(value: str | None, indices: list[int], faults: list[str]) -> None:
    chosen, said = visible_devices(GPUS, value, "V")
    assert [info.index for info in chosen] == indices
    assert len(said) == len(faults)
    assert all(text.startswith(start) for text, start in zip(said, faults, strict=True))


def test_a_slice_is_named_by_its_uuid_only() -> None:
    whole = AcceleratorInfo("NV_GPU", "H100", index=1, uuid="GPU-b")
    part = AcceleratorInfo("NV_GPU", "MIG 1g.10gb", index=0, uuid="MIG-a", parent_uuid="GPU-a")
    assert visible_devices([part, whole], "MIG-a,1", "V") == ([part, whole], [])
    for value in ("0", "GPU-a"):
        chosen, faults = visible_devices([part, whole], value, "V")
        assert chosen == []
        assert faults == [f"V={value} names {value}, which is a device in MIG mode; list its slices by UUID: MIG-a"]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2]),
        ("", [0, 1, 2]),
        ("level_zero:2,0", [0, 2]),
        ("Level_Zero:GPU", [0, 1, 2]),
        ("*:gpu", [0, 1, 2]),
        ("*:*", [0, 1, 2]),
        ("level_zero:*;opencl:cpu", [0, 1, 2]),
        ("opencl:gpu", []),
        ("*:cpu", []),
        ("!level_zero:1", [0, 2]),
        ("!*:gpu", []),
        ("!opencl:gpu", [0, 1, 2]),
        ("level_zero:*;!level_zero:0,2", [1]),
        ("level_zero:1;level_zero:2", [1, 2]),
    ],
)
def test_a_selector_leaves_its_devices(value: str | None, indices: list[int]) -> None:
    chosen, faults = selected_devices(GPUS, value, "S")
    assert [info.index for info in chosen] == indices
    assert faults == []


@pytest.mark.parametrize(
    ("value", "indices", "fault"),
    [
        ("level_zero:0,7", [0], "S=level_zero:0,7 has level_zero:0,7, where no device that can be read has number 7"),
        ("level_zero:0.1", [], "S=level_zero:0.1 has level_zero:0.1, where '0.1' is not understood"),
        ("level_zero:", [], "S=level_zero: has level_zero:, where '' is not understood"),
        ("gpu", [], "S=gpu has gpu, which is not BACKEND:DEVICES with a backend of *, level_zero,"),
        ("vulkan:gpu;level_zero:1", [1], "S=vulkan:gpu;level_zero:1 has vulkan:gpu, which is not BACKEND:DEVICES"),
        ("*:0", [], "S=*:0 has *:0, which numbers devices of several backends; write level_zero:NUMBER"),
        ("!level_zero:x", [0, 1, 2], "S=!level_zero:x has !level_zero:x, where 'x' is not understood"),
    ],
)
def test_a_term_that_is_not_understood_is_a_fault(value: str, indices: list[int], fault: str) -> None:
    chosen, faults = selected_devices(GPUS, value, "S")
    assert [info.index for info in chosen] == indices
    assert len(faults) == 1
    assert faults[0].startswith(fault)


@given(st.none() | st.text() | st.text(alphabet="!*:;,.0127levzrogpuLE -MIG"))
def test_any_list_of_devices_is_read_without_an_error(value: str | None) -> None:
    for choose in (visible_devices, selected_devices):
        chosen, faults = choose(GPUS, value, "V")
        assert len({info.index for info in chosen}) == len(chosen) <= len(GPUS)
        assert all(isinstance(fault, str) for fault in faults)


SEGFAULT = 'Fatal Python error: Segmentation fault\n\nThread 0x1:\n  File "/x/pynvml.py", line 5 in nvmlInitWithFlags\n'


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        (ChildEnd(-11, errors=SEGFAULT), "the vendor's library crashed its process (SIGSEGV) in nvmlInitWithFlags"),
        (ChildEnd(-70), "the vendor's library crashed its process (signal 70)"),
        (
            ChildEnd(None, errors=SEGFAULT),
            "the vendor's library gave no answer within 5 s in nvmlInitWithFlags; it was killed. Give it longer in "
            "agentd.toml, [hardware] probe_timeout_s; NVIDIA's persistence daemon",
        ),
        (ChildEnd(None, note="it hangs in the driver"), "it hangs in the driver"),
        (
            ChildEnd(1, errors="a\n\n b \n"),
            "the vendor's library ended its process with exit code 1; its last words: b",
        ),
        (ChildEnd(0, b""), "the vendor's library left no readable report (Input data was truncated): b''"),
        (ChildEnd(0, b"[" * 100_000), "the vendor's library left no readable report ("),
        (
            ChildEnd(0, b'{"infos": [{"type": 5}]}'),
            "the vendor's library left no readable report (Expected `str`, got `int`",
        ),
        (
            ChildEnd(0, b'{"more": 1}'),
            "the vendor's library left no readable report (Object contains unknown field `more`)",
        ),
        (
            ChildEnd(0, b'{"infos": [{"type": "NPU", "model": ""}]}'),
            "the vendor's library reported devices of another type",
        ),
        (
            ChildEnd(0, b'{"infos": [{"type": "NV_GPU", "model": "", "memory_bytes": 9223372036854775808}]}'),
            "the vendor's library reported a number of more than 64 bits",
        ),
    ],
)
def test_each_end_of_a_child_has_its_fault(end: ChildEnd, fault: str) -> None:
    report = read_answer(end, "NV_GPU", 5)
    assert report.infos == []
    assert len(report.faults) == 1
    assert report.faults[0].startswith(fault)


def test_a_vendor_shows_by_its_device_files_or_its_library(tmp_path: object) -> None:
    assert Vendor(AcceleratorType.NV_GPU, ("/dev/nul*",)).may_be_present({})
    assert not Vendor(AcceleratorType.NV_GPU, ("/dev/nowhere*",), ("libnowhere.so",)).may_be_present({})
    (tmp_path / "libhere.so").touch()  # type: ignore[operator]
    vendor = Vendor(AcceleratorType.NV_GPU, libraries=("libhere.so",))
    assert vendor.may_be_present({"LD_LIBRARY_PATH": f":/nowhere:{tmp_path}"})


def test_facts_of_an_accelerator() -> None:
    util = AcceleratorUtil
    assert util.get_accelerator_type({"ACCELERATOR_TYPE": "NPU"}) is AcceleratorType.NPU
    assert util.get_visibility_variable("AMD_GPU") == "HIP_VISIBLE_DEVICES"
    assert util.get_accelerator_env_var(AcceleratorType.NV_GPU, [0, "GPU-1"]) == {"CUDA_VISIBLE_DEVICES": "0,GPU-1"}
    assert util.get_accelerator_env_var("INTEL_GPU", [1]) == {"ONEAPI_DEVICE_SELECTOR": "level_zero:1"}
    assert util.get_accelerator_env_var("NO_ACCEL", [1]) == {}
    assert util.get_visible_devices("NV_GPU", {"CUDA_VISIBLE_DEVICES": "0, GPU-1"}) == [0, "GPU-1"]
    assert util.get_visible_devices("NV_GPU", {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert util.get_visible_devices("INTEL_GPU", {"ONEAPI_DEVICE_SELECTOR": "level_zero:1,2"}) == [1, 2]
    assert util.get_visible_devices("INTEL_GPU", {"ONEAPI_DEVICE_SELECTOR": "!*:gpu"}) == []
    assert util.get_visible_devices("NV_GPU", {}) is None
    assert [util.get_ccl_backend(kind) for kind in ("NV_GPU", "NPU", "NO_ACCEL")] == ["nccl", "hccl", "gloo"]
    assert util.get_ccl_socket_ifname_env_var("KUNLUN_XPU") == "BKCL_SOCKET_IFNAME"
    assert util.get_ccl_socket_ifname_env_var("NO_ACCEL") == "GLOO_SOCKET_IFNAME"
    assert util.get_device_type("MUSA_GPU") == "musa"
    with pytest.raises(ConfigError, match="there is no accelerator type 'TPU'"):
        util.get_ccl_backend("TPU")


def test_a_platform_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        cuda = "torch.cuda"

    monkeypatch.setitem(sys.modules, "torch", Torch())
    assert AcceleratorUtil.get_torch_platform("AMD_GPU") == "torch.cuda"
    with pytest.raises(UsageError, match=r"torch has no module torch\.npu here"):
        AcceleratorUtil.get_torch_platform("NPU")
