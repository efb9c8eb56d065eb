"""The probe on machines of every vendor: trees of files, with tools that answer as the captures, or anything else."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Awaitable, Callable
from pathlib import Path

import pace
import pytest
from vendor_kit import Tree, capture

from rlinf_actors import procfs
from rlinf_actors.hardware import probe
from rlinf_actors.hardware.probe import run_probe
from rlinf_actors.hardware.probe_report import ProbeReport, resources_from_reports
from rlinf_actors.model.hardware import AcceleratorInfo
from rlinf_actors.settings import PROBE_LIMIT

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("nothing_left")]
Probe = Callable[..., Awaitable[ProbeReport]]

MI300, UUIDS = "AMD Instinct MI300X", ("GPU-5c88007d6b7b0f5b", "GPU-0000000000000011")
XPU = ("xpu-smi", {"discovery -j": "xpu_smi_discovery.json", "stats -d 0 -j": "xpu_smi_stats.json",
                   "stats -d 1 -j": "xpu_smi_stats.json"})  # fmt: skip
NPU = ("npu-smi", {"info -m": "npu_smi_mapping.txt", "info": "npu_smi_info.txt"})
MUSA = ("mthreads-gmi", {"-L": "mthreads_list.txt", "-q": "mthreads_details.txt"})


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


async def probed(tree: Tree, **more: str) -> ProbeReport:
    return await run_probe(timeout_s=pace.PATIENCE_S, env={**tree.environ, **more})


@pytest.fixture
def own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """PROBE_LIMIT is the test's: little time for a tool is not little for the process that runs it, slow to start."""
    monkeypatch.setattr(probe, "PROBE_LIMIT", "NOT_THE_LIMIT")


def devices(report: ProbeReport) -> list[AcceleratorInfo]:
    found = [info for resource in resources_from_reports(report.resources) for info in resource.infos]
    return [info for info in found if isinstance(info, AcceleratorInfo)]


def indices(report: ProbeReport) -> list[int]:
    return [info.index for info in devices(report)]


# --- AMD ---


async def test_amd_by_sysfs_and_rocm_smi(tree: Tree) -> None:
    tree.amd()
    tree.tool("rocm-smi", f"out({capture('rocm_smi.json')!r})")
    report = await probed(tree)
    assert devices(report) == [
        AcceleratorInfo("AMD_GPU", MI300, 0, UUIDS[0], "0000:0c:00.0", 206141652992, 1, 5, 41),
        AcceleratorInfo("AMD_GPU", MI300, 1, UUIDS[1], "0000:22:00.0", 206141652992, 1, 5, 41),
    ]
    assert report.faults == []


async def test_amd_asks_no_tool_for_what_sysfs_says(tree: Tree) -> None:
    tree.amd()
    for bus in ("0000:0c:00.0", "0000:22:00.0"):
        tree.write(f"/sys/bus/pci/devices/{bus}/product_name", "MI300X")
    tree.tool("rocm-smi", "sys.exit('must not be asked')")
    report = await probed(tree)
    assert [info.model for info in devices(report)] == ["MI300X", "MI300X"]
    assert report.faults == []


AMDSMI = """
from enum import Enum
class AmdSmiMemoryType(Enum): VRAM = 0
class AmdSmiTemperatureType(Enum): EDGE = 0; HOTSPOT = 1
class AmdSmiTemperatureMetric(Enum): CURRENT = 0
class AmdSmiLibraryException(Exception): pass
def amdsmi_init(): pass
def amdsmi_get_processor_handles(): return ["0000:22:00.0", "0000:0c:00.0"]
def amdsmi_get_gpu_device_bdf(handle): return handle
def amdsmi_get_gpu_asic_info(handle): return {"market_name": "AMD Instinct MI300X", "asic_serial": "0x5C88007D6B7B0F5B"}
def amdsmi_get_gpu_memory_total(handle, kind): return 192 << 30
def amdsmi_get_gpu_activity(handle): return {"gfx_activity": "N/A", "umc_activity": 1}
def amdsmi_get_temp_metric(handle, kind, metric):
    if kind is AmdSmiTemperatureType.EDGE: raise AmdSmiLibraryException("AMDSMI_STATUS_NOT_SUPPORTED")
    return 51
"""
"""The functions of amdsmi 7.0.2 that are called, with the forms of what they return."""


async def test_amd_by_amdsmi(tree: Tree) -> None:
    tree.amd()
    tree.write("/lib/amdsmi.py", AMDSMI)
    report = await probed(tree, PYTHONPATH=str(tree.root / "lib"))
    assert devices(report) == [
        AcceleratorInfo("AMD_GPU", MI300, 0, UUIDS[0], "0000:0c:00.0", 192 << 30, 1, 5, 51),
        AcceleratorInfo("AMD_GPU", MI300, 1, UUIDS[1], "0000:22:00.0", 192 << 30, 1, 5, 51),
    ]
    assert report.faults == []


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("raise KeyError('libamd_smi.so')", "amdsmi cannot be imported (KeyError: 'libamd_smi.so'); /sys and"),
        (AMDSMI + "def amdsmi_init(): raise OSError('no driver')", "amdsmi does not answer (OSError: no driver); /sys"),
    ],
)
async def test_amd_with_a_broken_amdsmi(tree: Tree, code: str, fault: str) -> None:
    tree.amd()
    tree.write("/lib/amdsmi.py", code)
    tree.tool("rocm-smi", f"out({capture('rocm_smi.json')!r})")
    report = await probed(tree, PYTHONPATH=str(tree.root / "lib"))
    assert [info.model for info in devices(report)] == [MI300, MI300]
    assert report.faults[0].startswith(f"AMD_GPU: {fault}")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, [(0, UUIDS[1])]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, [(1, UUIDS[0])]),
        ({"HIP_VISIBLE_DEVICES": UUIDS[1]}, [(1, UUIDS[1])]),
        ({"ROCR_VISIBLE_DEVICES": UUIDS[1][:8], "HIP_VISIBLE_DEVICES": "0"}, [(0, UUIDS[1])]),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": ""}, [(0, UUIDS[0])]),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, [(1, UUIDS[1])]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
async def test_amds_variables(tree: Tree, variables: dict[str, str], found: list[tuple[int, str]]) -> None:
    tree.amd()
    tree.tool("rocm-smi", f"out({capture('rocm_smi.json')!r})")
    report = await probed(tree, **variables)
    assert [(info.index, info.uuid) for info in devices(report)] == found
    assert report.faults == []


# --- Intel ---


async def test_intel_by_xpu_smi(tree: Tree) -> None:
    tree.intel()
    tree.prints(*XPU)
    report = await probed(tree)
    name, uuid = "Intel(R) Data Center GPU Max 1550", "01000000-0000-0000-0000-000000{}0000"
    assert devices(report) == [
        AcceleratorInfo("INTEL_GPU", name, 0, uuid.format("29"), "0000:29:00.0", 128 << 30, 0, 57, 41),
        AcceleratorInfo("INTEL_GPU", name, 1, uuid.format("3a"), "0000:3a:00.0", 128 << 30, 1, 57, 41),
    ]
    assert report.faults == []


@pytest.mark.parametrize("body", [f"out({capture('kunlun_devices.txt')!r})", "out('{\"device_list\": [')", "out('{}')"])
async def test_intel_by_sysfs_where_the_tool_is_anothers(tree: Tree, body: str) -> None:
    tree.intel()
    tree.tool("xpu-smi", body)
    report = await probed(tree)
    assert [(info.pci_bus, info.memory_bytes) for info in devices(report)] == [
        ("0000:29:00.0", 128 << 30),
        ("0000:3a:00.0", 128 << 30),
    ]
    assert "did not print Intel's list of devices" in report.faults[0]


async def test_intel_without_the_tool(tree: Tree) -> None:
    tree.intel()
    report = await probed(tree, ONEAPI_DEVICE_SELECTOR="level_zero:1")
    assert indices(report) == [1]
    assert report.faults == []


async def test_an_integrated_gpu_starts_nothing(tree: Tree) -> None:
    tree.pci("0000:00:02.0", "0x8086", "0x030000")
    report = await run_probe(python="/nowhere/python", env=tree.environ)
    assert (report.resources, report.faults) == ([], [])


# --- Ascend, Moore Threads, Kunlun ---


async def test_ascend(tree: Tree) -> None:
    tree.ascend()
    tree.prints(*NPU)
    report = await probed(tree, ASCEND_RT_VISIBLE_DEVICES="1,0")
    assert [(info.index, info.numa_node) for info in devices(report)] == [(1, -1), (0, 3)]
    assert report.faults == ["NPU: NPU 1, chip 0 (logic id 1) has health Alarm"]


async def test_moore_threads(tree: Tree) -> None:
    tree.moore_threads()
    tree.prints(*MUSA)
    report = await probed(tree, MUSA_VISIBLE_DEVICES="0")
    assert [(info.index, info.numa_node, info.model) for info in devices(report)] == [(0, 0, "MTT S4000")]
    assert report.faults == []


@pytest.mark.parametrize("name", ["xpu_smi", "xpu-smi"])
async def test_kunlun(tree: Tree, name: str) -> None:
    tree.kunlun()
    tree.tool(name, f"out({capture('kunlun_devices.txt')!r})")
    report = await probed(tree, CUDA_VISIBLE_DEVICES="0")
    assert [(info.type, info.index, info.numa_node) for info in devices(report)] == [("KUNLUN_XPU", 0, 1)]
    assert report.faults == []


async def test_intels_tool_is_not_asked_for_kunlun_if_there_is_kunluns(tree: Tree) -> None:
    tree.kunlun()
    tree.tool("xpu_smi", f"out({capture('kunlun_boxes.txt')!r})")
    tree.tool("xpu-smi", "sys.exit('must not be asked')")
    report = await probed(tree)
    assert indices(report) == [0, 1]
    assert report.faults == []


async def test_a_tool_without_its_devices_is_never_run(tree: Tree) -> None:
    for name in ("xpu-smi", "xpu_smi", "npu-smi", "mthreads-gmi", "rocm-smi"):
        tree.tool(name, "sys.exit('must not be asked')")
    report = await run_probe(python="/nowhere/python", env=tree.environ)
    assert (report.resources, report.faults) == ([], [])


@pytest.mark.parametrize("after", ["", "signal.pause()"])
@pytest.mark.usefixtures("own_limit")
async def test_processes_started_by_a_tool_do_not_stay_with_an_agent(tree: Tree, after: str) -> None:
    procfs.set_subreaper()  # as agentd is: orphans come to this process, and `nothing_left` sees them
    tree.kunlun()
    answer = f"out({capture('kunlun_devices.txt')!r})\nsys.stdout.flush()"
    tree.tool("xpu_smi", f"{answer}\nif os.fork() == 0: signal.pause()\n{after}")
    report = await probed(tree, **{PROBE_LIMIT: "10" if after else "60"})
    assert indices(report) == [0, 1]


async def test_cancelling_the_probe_kills_the_processes_of_tools(tree: Tree, tmp_path: Path) -> None:
    tree.kunlun()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    tree.tool(
        "xpu_smi",
        f"pid = os.fork()\nif pid: open({str(fifo)!r}, 'w').write(f'{{os.getpid()}} {{pid}}')\nsignal.pause()",
    )
    task = asyncio.ensure_future(probed(tree))
    pids = (await asyncio.to_thread(fifo.read_text)).split()
    pidfds = [os.pidfd_open(int(pid)) for pid in pids]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], pace.PATIENCE_S)[0]
        os.close(pidfd)


# --- tools that do anything ---

TOOLS = {
    "ascend": "npu-smi",
    "moore_threads": "mthreads-gmi",
    "kunlun": "xpu_smi",
    "amd": "rocm-smi",
    "intel": "xpu-smi",
}
HANG = "signal.pause()"
KEPT = {"amd": 2, "intel": 2}
"""Devices that /sys tells of without the tool."""


@pytest.mark.parametrize("vendor", TOOLS)
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)"),
        ("sys.exit('dcmi module initialize failed')", "ended with exit code 1; its last words: dcmi module"),
        ("os.write(1, bytes(range(256)) * 64)", "print"),
        ("out('')", "print"),
        (HANG, "s; it was killed. Give it longer in agentd.toml"),
        (None, "is not installed"),
    ],
)
@pytest.mark.usefixtures("own_limit")
async def test_a_broken_tool_is_a_fault(tree: Tree, vendor: str, body: str | None, fault: str) -> None:
    getattr(tree, vendor)()
    if body is not None:
        tree.tool(TOOLS[vendor], body)
    report = await probed(tree, **{PROBE_LIMIT: "2" if body == HANG else "60"})
    assert len(devices(report)) == KEPT.get(vendor, 0)
    if vendor == "intel" and body is None:  # /sys is enough
        assert report.faults == []
    else:
        assert len(report.faults) in (1, 2)
        assert all(fault in said for said in report.faults)
