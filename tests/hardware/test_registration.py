"""Vendors that packages add: the type, its row, and the probe that asks them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pace
import pytest
from vendor_kit import Tree

from rlinf_actors import AcceleratorFacts, AcceleratorInfo, AcceleratorType, AcceleratorUtil, FoundAccelerators
from rlinf_actors.cluster.cluster_nodes import node_info
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware import probe as probe_module
from rlinf_actors.hardware.child_process import ChildEnd
from rlinf_actors.hardware.probe import run_probe
from rlinf_actors.hardware.probe_report import accelerator_type_of, resource_to_report, resources_from_reports
from rlinf_actors.messaging.cuda_ipc import Devices
from rlinf_actors.model.hardware import HardwareResource
from rlinf_actors.model.node import NodeGroupInfo
from rlinf_actors.placement.environment import worker_environment
from rlinf_actors.placement.node_order import RegisteredNode, order_nodes
from rlinf_actors.placement.resolver import ResourceTable, place, place_on_nodes
from rlinf_actors.wire.values import Extension, NodeReport, NodeState

pytestmark = pytest.mark.usefixtures("registries")
FACTS = AcceleratorFacts("MY_TPU_VISIBLE_DEVICES", "tccl", "tpu", "TCCL_IFNAME", torch_plugin="torch_mytpu")


def register(name: str = "MY_TPU") -> None:
    @AcceleratorUtil.register_accelerator(name, FACTS, devices=("/dev/mytpu[0-9]*",))
    def find(environ: Mapping[str, str]) -> FoundAccelerators:
        return FoundAccelerators()


# --- the type and its row ---


def test_a_registered_type_behaves_like_a_built_in_one() -> None:
    register()
    kind = AcceleratorType("MY_TPU")
    assert kind is AcceleratorType("MY_TPU") is AcceleratorType.named("MY_TPU")
    assert isinstance(kind, AcceleratorType)
    assert (str(kind), f"{kind}", kind.name, kind.value, kind) == ("MY_TPU",) * 5
    assert repr(kind) == "<AcceleratorType.MY_TPU: 'MY_TPU'>"
    assert pickle.loads(pickle.dumps(kind)) is kind is copy.deepcopy(kind)  # noqa: S301
    assert {kind: 1}[AcceleratorType("MY_TPU")] == 1
    assert kind != AcceleratorType.NPU
    assert list(AcceleratorType)[-1] is AcceleratorType.NO_ACCEL


def test_its_row_is_used() -> None:
    register()
    assert AcceleratorUtil.get_ccl_backend("MY_TPU") == "tccl"
    assert AcceleratorUtil.get_accelerator_env_var("MY_TPU", [1, 0]) == {"MY_TPU_VISIBLE_DEVICES": "1,0"}
    assert AcceleratorUtil.get_accelerator_type({"ACCELERATOR_TYPE": "MY_TPU"}) is AcceleratorType("MY_TPU")


def test_a_process_that_does_not_know_a_type_can_be_told_of_it(tmp_path: Path) -> None:
    register()
    (tmp_path / "kind").write_bytes(pickle.dumps([AcceleratorType("MY_TPU"), AcceleratorType.NPU]))
    code = (
        "import pickle, sys\nfrom rlinf_actors import AcceleratorType\n"
        "tpu, npu = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(repr(tpu), npu is AcceleratorType.NPU)\n"
        "try: AcceleratorType('MY_TPU')\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "kind")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "<AcceleratorType.MY_TPU: 'MY_TPU'> True",
        "'MY_TPU' is not a valid AcceleratorType",
    ]


def test_a_name_is_registered_once() -> None:
    register()
    register()  # the same function again, as a module that is loaded twice does
    with pytest.raises(ValueError, match=r"accelerator type MY_TPU is registered by .*register\.<locals>\.find"):
        AcceleratorUtil.register_accelerator("MY_TPU", FACTS)(lambda environ: FoundAccelerators())
    with pytest.raises(ValueError, match="accelerator type NPU is built in"):
        register("NPU")
    with pytest.raises(ValueError, match="'my tpu' cannot be a type of accelerator"):
        register("my tpu")


def test_an_accelerator_type_is_refused_in_a_hardware_section() -> None:
    register()
    groups = [{"label": "a", "node_ranks": 0, "hardware": {"type": "MY_TPU", "configs": []}}]
    with pytest.raises(ConfigError, match="'MY_TPU' is a type of accelerator: those are found by themselves"):
        ClusterConfig.from_any({"num_nodes": 1, "node_groups": groups})


# --- a type that only the node knows ---

RESOURCE = HardwareResource(
    "THEIR_TPU", [AcceleratorInfo("THEIR_TPU", "v1", index=index, uuid=f"T-{index}") for index in range(2)], "their.lab"
)


def reported_node() -> NodeReport:
    return NodeReport("n", "n", "10.0.0.1", "h", 1, 1, "3.11", "/py", resources=[resource_to_report(RESOURCE)])


def test_a_report_of_a_type_that_is_not_known_here() -> None:
    report = reported_node()
    assert resources_from_reports(report.resources) == [RESOURCE]
    assert accelerator_type_of(report.resources) == "THEIR_TPU"
    node = node_info(NodeState(report, "i", 0, "ready", 0.0, False))
    assert (node.num_accelerators, str(node.accelerator_type), node.accelerator_model) == (2, "THEIR_TPU", "v1")
    assert node.accelerator_registered_by == "their.lab"
    assert pickle.loads(pickle.dumps(node)) == node  # noqa: S301


def test_a_node_with_a_registered_type_is_ordered() -> None:
    kinds = ("NO_ACCEL", "THEIR_TPU", "A_TPU", "NPU")
    nodes = [RegisteredNode(kind, accelerator_type=kind, ip=f"10.0.0.{at}") for at, kind in enumerate(kinds)]
    ranks = order_nodes(nodes)
    assert sorted(kinds, key=ranks.__getitem__) == ["NPU", "A_TPU", "THEIR_TPU", "NO_ACCEL"]


def test_a_placement_on_an_unknown_type_says_what_to_load() -> None:
    node = node_info(NodeState(reported_node(), "i", 0, "ready", 0.0, False))
    group = NodeGroupInfo(label="tpus", nodes=[node])
    placements = place([[0], [1]], ResourceTable([group]))
    assert [str(placement.accelerator_type) for placement in placements] == ["THEIR_TPU", "THEIR_TPU"]
    with pytest.raises(ConfigError, match=r"'THEIR_TPU' .* module their\.lab here, or name that module in RLINF_EXT"):
        worker_environment("g", placements[0], placements, node, group, "job", comm_net_devices="eth0")
    # a worker of the node itself needs none of them
    whole = NodeGroupInfo(label="node", nodes=[node])
    on_node = place_on_nodes([(whole, node)])
    env = worker_environment("g", on_node[0], on_node, node, whole, "job", comm_net_devices="eth0")
    assert (env["ACCELERATOR_TYPE"], env["GLOO_SOCKET_IFNAME"]) == ("THEIR_TPU", "eth0")


@pytest.mark.torch
def test_a_worker_that_does_not_know_the_type_has_no_device_of_it() -> None:
    devices = Devices({"ACCELERATOR_TYPE": "THEIR_TPU", "VISIBLE_DEVICES": "0"})
    assert (devices.kind, devices.ccl, devices.home) == ("cpu", "", None)


# --- the probe ---

LAB = """
import os, signal
from rlinf_actors import AcceleratorFacts, AcceleratorInfo, AcceleratorUtil, FoundAccelerators
from rlinf_actors.hardware.visibility import visible_devices

def tpu(name, devices, ask):
    facts = AcceleratorFacts(name + "_VISIBLE_DEVICES", "tccl", "tpu", "")
    @AcceleratorUtil.register_accelerator(name, facts, devices=(devices,))
    def find(environ):
        ask()
        infos = [AcceleratorInfo(name, "v1", index=index) for index in range(4)]
        found = visible_devices(infos, environ.get(facts.visibility_variable), facts.visibility_variable)
        return FoundAccelerators(*found)
    find.__qualname__ = name

def register():
    print("this is no report")
    tpu("WELL_TPU", "/dev/null", lambda: None)
    tpu("AWAY_TPU", "/dev/nowhere*", lambda: None)
    tpu("HANGING_TPU", "/dev/null", signal.pause)
    tpu("CRASHING_TPU", "/dev/null", lambda: os.kill(os.getpid(), signal.SIGSEGV))
    tpu("BROKEN_TPU", "/dev/null", lambda: 1 / 0)
    facts = AcceleratorFacts("", "", "tpu", "")
    AcceleratorUtil.register_accelerator("WRONG_TPU", facts, devices=("/dev/null",))(lambda environ: [1])
"""


@pytest.mark.live
async def test_registered_vendors_are_asked_each_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_child = probe_module.run_child

    async def child(module: str, arguments: Sequence[str], *, timeout_s: float, **more: Any) -> ChildEnd:
        """Little time for the one that hangs is not little for the others, slow to start."""
        left_s = 1.0 if arguments[0] == "HANGING_TPU" else timeout_s
        return await run_child(module, arguments, timeout_s=left_s, **more)

    monkeypatch.setattr(probe_module, "run_child", child)
    tree = Tree(tmp_path / "root")
    tree.write("/dev/null")
    (tmp_path / "lab.py").write_text(LAB)
    more = {"RLINF_EXT_MODULE": "lab", "PYTHONPATH": str(tmp_path), "WELL_TPU_VISIBLE_DEVICES": "3,1"}
    report = await run_probe(timeout_s=pace.PATIENCE_S, env={**tree.environ, **more})
    found = resources_from_reports(report.resources)
    assert [(resource.type, resource.registered_by) for resource in found] == [("WELL_TPU", "lab")]
    assert [info.index for info in found[0].infos if isinstance(info, AcceleratorInfo)] == [3, 1]
    said = dict(fault.split(": ", 1) for fault in report.faults)
    assert said.keys() == {"HANGING_TPU", "CRASHING_TPU", "BROKEN_TPU", "WRONG_TPU"}
    assert said["HANGING_TPU"].startswith(f"the vendor's library gave no answer within {pace.PATIENCE_S:g} s")
    assert said["CRASHING_TPU"].startswith("the vendor's library crashed its process (SIGSEGV)")
    assert said["BROKEN_TPU"] == "ZeroDivisionError: division by zero"
    assert said["WRONG_TPU"] == "TypeError: find() of lab returned list; it must return FoundAccelerators"


def test_the_guess_outside_a_worker_knows_registered_types(tmp_path: Path) -> None:
    register()
    tree = Tree(tmp_path)
    assert AcceleratorUtil.get_accelerator_type(tree.environ) is AcceleratorType.NO_ACCEL
    tree.write("/dev/mytpu0")
    assert AcceleratorUtil.get_accelerator_type(tree.environ) is AcceleratorType("MY_TPU")


async def test_a_type_that_two_extensions_register_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLINF_EXT_MODULE may name a package that is installed with an entry point too."""
    asked: list[str] = []

    async def child(module: str, arguments: Sequence[str], **more: object) -> ChildEnd:
        asked.append(arguments[0])
        if arguments[0] == "extension":
            return ChildEnd(0, b'{"vendors": {"TWICE_TPU": "lab"}}')
        info = {"type": "TWICE_TPU", "model": "v1", "index": 4}
        return ChildEnd(0, msgspec.json.encode({"infos": [info]}))

    monkeypatch.setattr(probe_module, "run_child", child)
    extensions = [Extension("lab", "RLINF_EXT_MODULE"), Extension("lab", "rlinf_actors.accelerators", "lab 1")]
    monkeypatch.setattr(probe_module, "installed", lambda: extensions)
    report = await probe_module.run_probe(env={})
    assert sorted(asked) == ["TWICE_TPU", "extension", "extension"]
    assert [(found.type, len(found.infos), found.registered_by) for found in report.resources] == [
        ("TWICE_TPU", 1, "lab")
    ]


@pytest.mark.parametrize("value", ["", " ", "-1", "-1,0", "NoDevFiles"])
def test_the_guess_knows_no_type_whose_devices_are_all_hidden(tmp_path: Path, value: str) -> None:
    tree = Tree(tmp_path)
    tree.write("/dev/nvidiactl")
    shown = {**tree.environ, "CUDA_VISIBLE_DEVICES": "1", "ONEAPI_DEVICE_SELECTOR": ""}
    assert AcceleratorUtil.get_accelerator_type(shown) is AcceleratorType.NV_GPU
    hidden = {**tree.environ, "CUDA_VISIBLE_DEVICES": value}
    assert AcceleratorUtil.get_accelerator_type(hidden) is AcceleratorType.NO_ACCEL
    tree.write("/dev/dri/renderD128")
    assert AcceleratorUtil.get_accelerator_type(hidden) is not AcceleratorType.NV_GPU
