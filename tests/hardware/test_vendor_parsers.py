"""What the vendors' tools print, read: whole, cut short, and anything else. No process is started."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vendor_kit import CAPTURES, Tree, capture

from rlinf_actors.hardware.vendors import amd, ascend, intel, kunlun, moore_threads
from rlinf_actors.hardware.vendors.catalog import FoundAccelerators
from rlinf_actors.hardware.vendors.machine import Machine, Ran
from rlinf_actors.model.hardware import AcceleratorInfo


def ran(text: str, fault: str = "") -> Ran:
    return Ran("the tool", text, fault)


# --- Ascend ---


def test_ascend_chips() -> None:
    found = ascend.described(ran(capture("npu_smi_mapping.txt")), ran(capture("npu_smi_info.txt")))
    assert found.infos == [
        AcceleratorInfo("NPU", "Ascend 910B3", 0, "", "0000:c1:00.0", 65536 << 20, -1, 12, 36),
        AcceleratorInfo("NPU", "Ascend 910B3", 1, "", "0000:01:00.0", 65536 << 20, -1, 0, 38),
    ]
    assert found.faults == ["NPU 1, chip 0 (logic id 1) has health Alarm"]


def test_ascend_several_chips_on_a_card() -> None:
    states = ascend.parse_table(capture("npu_smi_info_310p.txt"))
    assert [(chip, state.info.memory_bytes >> 20, state.info.utilization) for chip, state in states.items()] == [
        ((8, 0), 21534, 0),
        ((8, 1), 21534, 3),
    ]
    mapped = ascend.parse_mapping(capture("npu_smi_mapping_phy.txt"))
    assert {chip: one.logic_id for chip, one in mapped.items()} == {(0, 0): 0, (0, 1): 1}


def test_ascend_with_half_of_the_answers() -> None:
    silent = ran("", "npu-smi crashed (SIGSEGV)")
    only_table = ascend.described(silent, ran(capture("npu_smi_info.txt")))
    assert [(info.index, info.model) for info in only_table.infos] == [(0, "910B3"), (1, "910B3")]
    assert only_table.faults[:2] == [
        "npu-smi crashed (SIGSEGV)",
        "the order of the NPUs is that of npu-smi info, since their logic ids are not known",
    ]
    only_mapping = ascend.described(ran(capture("npu_smi_mapping.txt")), silent)
    assert [(info.index, info.memory_bytes, info.temperature) for info in only_mapping.infos] == [
        (0, 0, -1),
        (1, 0, -1),
    ]
    assert only_mapping.faults == ["npu-smi crashed (SIGSEGV)"]


# --- Moore Threads ---


def test_moore_threads_gpus() -> None:
    found = moore_threads.described(ran(capture("mthreads_list.txt")), ran(capture("mthreads_details.txt")))
    uuid = "5ea4ee36-a8a0-4b5f-93d1-3f1a9f2d000"
    assert found == FoundAccelerators(
        [
            AcceleratorInfo("MUSA_GPU", "MTT S4000", 0, uuid + "1", "0000:3b:00.0", 48 << 30, -1, 4, 36),
            AcceleratorInfo("MUSA_GPU", "MTT S4000", 1, uuid + "2", "0000:86:00.0", 48 << 30, -1, 0, -1),
        ]
    )


def test_moore_threads_without_the_list_or_the_details() -> None:
    broken = ran("", "it hung")
    by_details = moore_threads.described(broken, ran(capture("mthreads_details.txt")))
    assert [(info.index, info.model, info.pci_bus) for info in by_details.infos] == [
        (0, "MTT S4000", "0000:3b:00.0"),
        (1, "MTT S4000", "0000:86:00.0"),
    ]
    by_list = moore_threads.described(ran(capture("mthreads_list.txt")), broken)
    assert [(info.index, info.memory_bytes) for info in by_list.infos] == [(0, 0), (1, 0)]
    assert by_list.faults == by_details.faults == ["it hung"]


# --- Kunlun ---


def test_kunlun_xpus() -> None:
    assert kunlun.described(ran(capture("kunlun_devices.txt"))) == FoundAccelerators(
        [
            AcceleratorInfo("KUNLUN_XPU", "R200", 0, "02K00Y6217V0006C", "0000:4b:00.0", 32 << 30, -1, 23, 45),
            AcceleratorInfo("KUNLUN_XPU", "R200", 1, "02K00Y6217V0007D", "0000:5e:00.0", 32 << 30, -1, 0, 43),
        ]
    )


def test_kunlun_newer_driver() -> None:
    assert kunlun.described(ran(capture("kunlun_boxes.txt"))) == FoundAccelerators(
        [
            AcceleratorInfo("KUNLUN_XPU", "P800 OAM", 0, "", "0000:03:00.0", 96 << 30, -1, 12, 36),
            AcceleratorInfo("KUNLUN_XPU", "P800 OAM", 1, "", "0000:05:00.0", 96 << 30, -1, 0, 39),
        ]
    )


def test_kunlun_is_not_misled_by_intels_tool() -> None:
    found = kunlun.described(ran(capture("xpu_smi_discovery.json")))
    assert found.faults == ["the tool is Intel's tool here; put Kunlun's xpu_smi on PATH"]
    assert found.infos == []


# --- Intel ---


def test_intel_gpus() -> None:
    listed = intel.parse_discovery(capture("xpu_smi_discovery.json"))
    assert listed is not None
    assert [(info.index, info.model, info.pci_bus) for info in listed] == [
        (0, "Intel(R) Data Center GPU Max 1550", "0000:29:00.0"),
        (1, "Intel(R) Data Center GPU Max 1550", "0000:3a:00.0"),
    ]
    assert intel.parse_memory(capture("xpu_smi_discovery_one.json")) == 128 << 30
    assert intel.parse_stats(capture("xpu_smi_stats.json")) == (57, 41)


@pytest.mark.parametrize("name", ["kunlun_devices.txt", "kunlun_boxes.txt", "xpu_smi_stats.json"])
def test_intel_is_not_misled_by_kunluns_tool(name: str) -> None:
    assert intel.parse_discovery(capture(name)) is None


def test_intels_integrated_graphics_are_no_accelerators(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.intel()
    tree.pci("0000:80:00.0", "0x8086", "0x088000")  # an accelerator for data moves, no GPU
    infos = intel.from_sysfs(Machine(tree.environ))
    assert infos == [
        AcceleratorInfo("INTEL_GPU", "Intel GPU 0x0bd5", 0, "", "0000:29:00.0", 128 << 30, 0),
        AcceleratorInfo("INTEL_GPU", "Intel GPU 0x0bd5", 1, "", "0000:3a:00.0", 128 << 30, 1),
    ]


# --- AMD ---


def test_amd_topology(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.amd()
    tree.write("/sys/class/kfd/kfd/topology/nodes/3/properties")  # of another container: the kernel lets nobody read it
    infos = amd.from_topology(Machine(tree.environ))
    assert infos == [
        AcceleratorInfo("AMD_GPU", "gfx942", 0, "GPU-5c88007d6b7b0f5b", "0000:0c:00.0", 0, 1),
        AcceleratorInfo("AMD_GPU", "gfx942", 1, "GPU-0000000000000011", "0000:22:00.0", 0, 1),
    ]


def test_rocm_smi() -> None:
    names = ("model", "uuid", "memory_bytes", "utilization", "temperature")
    first = ("AMD Instinct MI300X", "GPU-5c88007d6b7b0f5b", 206141652992, 17, 45)
    second = ("AMD Instinct MI300X", "GPU-9e88007d6b7b0f5c", 206141652992, 0, 47)
    assert amd.parse_rocm_smi(capture("rocm_smi.json")) == {
        "0000:0c:00.0": dict(zip(names, first, strict=True)),
        "0000:22:00.0": dict(zip(names, second, strict=True)),
    }


# --- anything at all ---

PARSERS: list[Callable[[str], Any]] = [
    lambda text: ascend.described(ran(text), ran(text)),
    lambda text: moore_threads.described(ran(text), ran(text)),
    lambda text: kunlun.described(ran(text)),
    intel.parse_discovery,
    intel.parse_memory,
    intel.parse_stats,
    amd.parse_rocm_smi,
    amd.parse_properties,
]
TEXTS = sorted(path.read_text() for path in CAPTURES.iterdir())


def check(text: str) -> None:
    """Never an exception, and what is found can travel: numbers of a size that messages hold."""
    for parse in PARSERS:
        found = parse(text)
        infos = found.infos if isinstance(found, FoundAccelerators) else found if isinstance(found, list) else []
        for info in infos:
            assert isinstance(info, AcceleratorInfo)
            assert 0 <= info.index < 1 << 31
            assert 0 <= info.memory_bytes < 1 << 63
            assert -1 <= info.utilization < 1 << 31
            assert -1 <= info.temperature < 1 << 31
        if isinstance(found, FoundAccelerators):
            assert found.infos or found.faults


@given(st.text())
def test_any_text(text: str) -> None:
    check(text)


@given(st.sampled_from(TEXTS), st.data())
def test_an_answer_that_is_cut_short(text: str, data: st.DataObject) -> None:
    check(text[: data.draw(st.integers(0, len(text)))])


@given(st.sampled_from(TEXTS), st.integers(0, 1 << 32), st.text(max_size=8))
def test_an_answer_with_lines_that_are_wrong(text: str, seed: int, noise: str) -> None:
    chance = random.Random(seed)
    lines = text.splitlines()
    for _ in range(3):
        at = chance.randrange(len(lines))
        cut = chance.randrange(len(lines[at]) + 1)
        lines[at] = chance.choice((lines[at][:cut], lines[at][:cut] + noise + lines[at][cut:], chance.choice(lines)))
    check("\n".join(lines))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=8))
def test_json_of_another_form(value: Any) -> None:
    for name in ("device_list", "device_level", "tile_level", "card0", "device_id", "memory_physical_size_byte"):
        check(json.dumps({name: value}))
        check(json.dumps({name: [{"device_id": 0, "metrics_type": name, "value": value, "pci_bdf_address": value}]}))
    check(json.dumps(value))
