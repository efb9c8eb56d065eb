"""The probe against a real subprocess and a library that does what it should, or anything else."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pace
import pytest

from rlinf_actors.hardware import probe as probe_module
from rlinf_actors.hardware.accelerators import Accelerator, AcceleratorUtil
from rlinf_actors.hardware.probe import run_probe
from rlinf_actors.hardware.probe_report import ProbeReport, resources_from_reports
from rlinf_actors.hardware.vendors.catalog import VENDORS, Vendor
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType
from rlinf_actors.model.node import NodeInfo

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("nothing_left")]
Probe = Callable[..., Awaitable[ProbeReport]]


def devices(report: ProbeReport) -> list[AcceleratorInfo]:
    found = [info for resource in resources_from_reports(report.resources) for info in resource.infos]
    assert all(isinstance(info, AcceleratorInfo) for info in found)
    return [info for info in found if isinstance(info, AcceleratorInfo)]


async def test_eight_devices_have_all_properties_of_nvml(probe: Probe) -> None:
    report = await probe()
    found = devices(report)
    assert report.faults == []
    assert [info.index for info in found] == list(range(8))
    assert (found[3].type, found[3].model, found[3].uuid) == ("NV_GPU", "NVIDIA H100", "GPU-3")
    assert (found[3].pci_bus, found[3].memory_bytes) == ("0000:13:00.0", 80 << 30)
    assert (found[3].utilization, found[3].temperature) == (7, 41)


async def test_the_report_describes_the_node(probe: Probe) -> None:
    report = await probe()
    assert report.hostname == os.uname().nodename
    assert report.num_cpus == len(os.sched_getaffinity(0))
    assert report.memory_bytes > 1 << 20
    assert report.python == sys.version.split()[0]
    assert report.interpreter == sys.executable
    assert report.interfaces["lo"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("value", "indices"), [("2,0", [2, 0]), ("GPU-5,1", [5, 1]), ("", []), ("-1", []), ("0,-1,3", [0]), ("7,", [7])]
)
async def test_the_nodes_variable_selects_and_orders_devices(probe: Probe, value: str, indices: list[int]) -> None:
    report = await probe(CUDA_VISIBLE_DEVICES=value)
    assert [info.index for info in devices(report)] == indices
    assert report.faults == []


UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f{}"
SLICED = (
    f"NVIDIA H100,{UUID.format(6)},81920;MIG 1g.10gb,MIG-4c1d-a,9728;MIG 3g.40gb,MIG-77f0-b,40192;"
    f"NVIDIA H100,{UUID.format(7)},81920"
)


async def test_slices_stand_in_the_place_of_their_gpu(probe: Probe) -> None:
    report = await probe(devices=SLICED)
    first, second, whole = devices(report)
    assert report.faults == []
    assert (first.model, first.uuid, first.memory_bytes) == ("MIG 1g.10gb", "MIG-4c1d-a", 9728 << 20)
    assert (second.index, second.pci_bus, second.parent_uuid) == (0, "0000:10:00.0", UUID.format(6))
    assert (second.utilization, second.temperature) == (-1, 41)
    assert (whole.index, whole.parent_uuid, whole.utilization) == (1, "", 7)
    node = NodeInfo(hardware_resources=resources_from_reports(report.resources))
    assert node.accelerator_device_names == ("MIG-4c1d-a", "MIG-77f0-b", UUID.format(7))


@pytest.mark.parametrize(
    ("value", "uuids", "faults"),
    [
        ("MIG-77f0-b,MIG-4c", ["MIG-77f0-b", "MIG-4c1d-a"], []),
        ("1", [UUID.format(7)], []),
        (UUID.format(7)[:-1], [UUID.format(7)], []),  # the slices' GPU cannot be meant
        ("0,1", [UUID.format(7)], ["NV_GPU: CUDA_VISIBLE_DEVICES=0,1 names 0, which is a device in MIG mode; list"]),
        (UUID.format(6), [], [f"NV_GPU: CUDA_VISIBLE_DEVICES={UUID.format(6)} names {UUID.format(6)}, which is a dev"]),
    ],
)
async def test_slices_are_listed_by_their_uuids(probe: Probe, value: str, uuids: list[str], faults: list[str]) -> None:
    report = await probe(devices=SLICED, CUDA_VISIBLE_DEVICES=value)
    assert [info.uuid for info in devices(report)] == uuids
    assert [said.startswith(start) for said, start in zip(report.faults, faults, strict=True)] == [True] * len(faults)


async def test_a_gpu_in_mig_mode_without_slices_is_a_fault(probe: Probe) -> None:
    report = await probe(devices="NVIDIA H100,GPU-0,81920;MIG -,-,0;NVIDIA H100,GPU-1,81920")
    assert [info.uuid for info in devices(report)] == ["GPU-1"]
    assert report.faults[0].startswith("NV_GPU: device 0 is in MIG mode and has no slice")


async def test_a_gpu_that_cannot_have_mig_mode(probe: Probe) -> None:
    report = await probe("mig=3")
    assert len(devices(report)) == 8
    assert report.faults == []


async def test_no_device_is_no_resource(probe: Probe) -> None:
    report = await probe(devices="-")
    assert report.resources == []
    assert report.faults == []


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("init=segfault", "NV_GPU: the vendor's library crashed its process (SIGSEGV) in nvmlInitWithFlags"),
        ("uuid@5=segfault", "NV_GPU: the vendor's library crashed its process (SIGSEGV) in nvmlDeviceGetUUID"),
        ("init=9", "NV_GPU: NVML does not start: Driver Not Loaded"),
        ("init=18", "NV_GPU: NVML does not start: RM has detected an NVML/RM version mismatch."),
        ("init=77", "NV_GPU: NVML does not start: Fake Error"),
        ("count=999", "NV_GPU: NVML does not start: Unknown Error"),
        (
            "count=exit",
            "NV_GPU: the vendor's library ended its process with exit code 3; its last words: fake NVML gives up",
        ),
        ("count=garbage", "NV_GPU: NVML says that there are 4000000000 devices, which cannot be"),
    ],
)
async def test_a_broken_library_loses_its_devices_and_is_named(probe: Probe, mode: str, fault: str) -> None:
    report = await probe(mode)
    assert report.resources == []
    assert report.faults == [fault]
    assert report.num_cpus > 0


async def test_a_library_that_hangs_is_killed_and_named(probe: Probe) -> None:
    report = await probe("init=hang", timeout_s=1)
    assert report.resources == []
    assert len(report.faults) == 1
    assert report.faults[0].startswith("NV_GPU: the vendor's library gave no answer within 1 s")


@pytest.mark.parametrize(
    ("mode", "start"),
    [("handle@2=15", "NV_GPU: device 2 cannot be used: GPU is lost"), ("name@2=garbage", "NV_GPU: device 2 cannot be")],
)
async def test_a_broken_device_costs_only_itself(probe: Probe, mode: str, start: str) -> None:
    report = await probe(mode)
    assert [info.index for info in devices(report)] == [0, 1, 3, 4, 5, 6, 7]
    assert len(report.faults) == 1
    assert report.faults[0].startswith(start)


async def test_a_missing_property_is_unknown(probe: Probe) -> None:
    report = await probe("utilization@0=3")
    assert [info.utilization for info in devices(report)][:2] == [-1, 7]


async def test_output_of_a_library_is_not_part_of_the_report(probe: Probe) -> None:
    report = await probe("name=print")
    assert len(devices(report)) == 8
    assert report.faults == []


async def test_a_process_forked_by_a_library_ends_with_the_probe(probe: Probe, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    report = await probe("init=fork", FAKE_NVML_PID_FILE=str(file))
    assert len(devices(report)) == 8
    _assert_ends(int(file.read_text()))


async def test_cancelling_the_probe_kills_its_processes(probe: Probe, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    task = asyncio.ensure_future(probe("init=hang", FAKE_NVML_PID_FILE=str(fifo)))
    pid = int(await asyncio.to_thread(fifo.read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    _assert_ends(pid)


def test_the_childs_process_ends_with_its_parent(nvml_environ: dict[str, str], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    environ = {**nvml_environ, "FAKE_NVML_MODE": "init=hang", "FAKE_NVML_PID_FILE": str(fifo)}
    root = str(Path(probe_module.__file__).parents[2])
    with subprocess.Popen([sys.executable, "-m", "rlinf_actors.hardware.probe"], env=environ, cwd=root) as parent:
        pid = int(fifo.read_text())
        parent.kill()
    _assert_ends(pid)


async def test_a_broken_vendor_does_not_affect_another(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Vendor(AcceleratorType.named("OTHER"), devices=("/dev/null",))
    monkeypatch.setattr(probe_module, "VENDORS", (other, *VENDORS))
    report = await probe()
    assert len(devices(report)) == 8
    assert report.faults == ["OTHER: LookupError: no vendor of OTHER is registered in the probe's process"]


async def test_without_device_files_no_process_is_started(tmp_path: Path) -> None:
    report = await run_probe(python="/nowhere/python", env={"RLINF_ACTORS_PROBE_ROOT": str(tmp_path)})
    assert report.resources == []
    assert report.faults == []


async def test_an_interpreter_that_is_missing_is_a_fault(nvml_environ: dict[str, str]) -> None:
    report = await run_probe(python="/nowhere/python", env=nvml_environ)
    assert len(report.faults) == 1
    assert report.faults[0].startswith("NV_GPU: its process cannot be started: ")


async def test_an_interpreter_without_nvidia_ml_py_is_a_fault(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ModuleNotFoundError('no pynvml', name='pynvml')\n")
    report = await probe(PYTHONPATH=str(tmp_path))
    assert report.faults == [
        f"NV_GPU: nvidia-ml-py is not installed for {sys.executable}; NVIDIA's devices cannot be read"
    ]


async def test_the_extension_registers_its_types(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "my_lab.py").write_text(
        "from dataclasses import dataclass\n"
        "from rlinf_actors.hardware.registry import HardwareConfig, NodeHardwareConfig\n"
        "def register():\n"
        "    print('registering')\n"
        "    @NodeHardwareConfig.register_hardware_config('MyArm')\n"
        "    @dataclass\n"
        "    class MyArmConfig(HardwareConfig):\n"
        "        ip: str = ''\n"
    )
    report = await probe(PYTHONPATH=str(tmp_path), RLINF_EXT_MODULE="my_lab")
    assert report.extension_types == ["MyArm"]
    assert report.faults == []
    assert len(devices(report)) == 8


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("def register(): raise OSError('no bus')", "register() of module 'my_lab' raised OSError: no bus"),
        ("import os\nos._exit(5)", "its module ended its process with exit code 5"),
        (
            "import sys\nsys.exit('no licence')",
            "its module ended its process with exit code 1; its last words: no licence",
        ),
        ("import os\nos.kill(os.getpid(), 9)", "its module crashed its process (SIGKILL)"),
    ],
)
async def test_a_broken_extension_costs_no_device(probe: Probe, tmp_path: Path, code: str, fault: str) -> None:
    (tmp_path / "my_lab.py").write_text(code + "\n")
    report = await probe(PYTHONPATH=str(tmp_path), RLINF_EXT_MODULE="my_lab")
    assert report.faults == [f"RLINF_EXT_MODULE: {fault}"]
    assert len(devices(report)) == 8


def test_the_command_prints_json(nvml_environ: dict[str, str]) -> None:
    root = str(Path(probe_module.__file__).parents[2])
    command = [sys.executable, "-m", "rlinf_actors.hardware.probe"]
    done = subprocess.run(command, env=nvml_environ, cwd=root, capture_output=True, check=True)
    assert done.stderr == b""
    assert len(json.loads(done.stdout)["resources"][0]["infos"]) == 8


async def test_accelerator_enumerates_this_machine(
    nvml_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", nvml_environ)
    found = Accelerator.enumerate(0)  # blocking, with this test's event loop running
    assert found is not None
    assert (found.type, found.count) == ("NV_GPU", 8)
    assert AcceleratorUtil.get_accelerator_type() is AcceleratorType.NV_GPU


def _assert_ends(pid: int) -> None:
    """Wait for the end of a process that was killed."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended = select.select([pidfd], [], [], pace.PATIENCE_S)[0]
        if not ended:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert ended
    finally:
        os.close(pidfd)
