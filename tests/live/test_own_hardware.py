"""A user's hardware type is asked on its node, whatever it does there."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import textwrap
from pathlib import Path

import pace
import pytest
from click.testing import CliRunner
from looking_hardware import Camera, Grip, LookingArm, LookingArmConfig, LookingArmInfo, Mover, section

from rlinf_actors import (
    Cluster,
    ConfigError,
    FlexiblePlacementStrategy,
    FrankaConfig,
    FrankaHWInfo,
    NodeLostError,
    WorkerGroup,
    WorkerStartError,
)
from rlinf_actors.cli.plan_command import plan
from rlinf_actors.cluster import cluster_nodes as cluster_hardware
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.group import launcher
from rlinf_actors.hardware import registry
from rlinf_actors.hardware.configured import piece_of
from rlinf_actors.testing import LocalCluster
from rlinf_actors.wire.client_messages import Enumerated
from rlinf_actors.wire.values import HardwareAnswer, NodeReport, NodeState

pytestmark = pytest.mark.live

HERE = str(Path(__file__).parent)


def with_variables(**variables: str) -> dict:
    """env_configs of node 1."""
    return {"env_configs": [{"node_ranks": 1, "env_vars": [{name: value} for name, value in variables.items()]}]}


@pytest.fixture(scope="module")
def two_nodes():
    with LocalCluster(num_nodes=2) as local:
        yield local


def infos(cluster: Cluster) -> list[list[LookingArmInfo]]:
    return [cluster.get_node_info(rank).get_hardware_infos("LookingArm") for rank in range(2)]


def test_hardware_is_enumerated_in_the_environment_of_the_node_group(two_nodes):
    config = section(
        {"node_rank": 1, "port": "/dev/ttyB", "grip": "three"}, {"node_rank": 0, "port": "/dev/ttyA"},
        **with_variables(ARM_NIC="eth7"),
    )  # fmt: skip
    with two_nodes.cluster(cluster_cfg=config) as cluster:
        (first,), (second,) = infos(cluster)
        assert isinstance(second, LookingArmInfo)
        # a described node pretends: what would look at the machine is switched off
        assert second.config == LookingArmConfig(1, "/dev/ttyB", Grip.THREE, disable_validate=True)
        assert second.camera == Camera("c1", (640, 480))
        assert (first.model, second.model) == ("v0", "v1")
        assert (first.seen["nic"], second.seen["nic"]) == ("", "eth7")
        assert {first.seen["python"], second.seen["python"]} == {sys.executable}
        assert str(os.getpid()) not in (first.seen["pid"], second.seen["pid"])
        assert cluster.get_node_group("lab").get_hardware_infos(1) == [second]

        group = Mover.create_group().launch(
            cluster, name="movers", placement_strategy=FlexiblePlacementStrategy([[0], [1]], "lab")
        )
        assert group.arms().wait() == [[first], [second]]
        assert group.arms_of_cluster().wait() == [[[first], [second]]] * 2
        assert [entry.info.hardware_infos for entry in group.worker_info_list] == [[first], [second]]
        attached = WorkerGroup.from_group_name(Mover, "movers")
        assert [entry.info.hardware_infos for entry in attached.worker_info_list] == [[first], [second]]


def test_type_without_configs_enumerates_alone(two_nodes):
    with two_nodes.cluster(cluster_cfg=section(**with_variables(ARM_PORTS="/dev/a,/dev/b"))) as cluster:
        none, found = infos(cluster)
        assert none == []
        assert [info.identity for info in found] == ["/dev/a", "/dev/b"]
        assert cluster.get_node_group("lab").hardware_resource_count == 2


WHERE = "cluster.node_groups[0].hardware"
ARM = {"node_rank": 1, "port": "p"}


@pytest.mark.parametrize(
    ("mode", "path", "message"),
    [
        ("abort", WHERE, "node node1 cannot say which LookingArm it has: enumerate() of LookingArm crashed its process "
         "(SIGABRT) in _misbehave"),
        ("exit", WHERE, "enumerate() of LookingArm ended its process with exit code 3; its last words: the SDK says"),
        ("garbage", WHERE, "enumerate() of LookingArm left no readable answer ("),
        ("wrong", WHERE, "LookingArm.enumerate returned ['an arm']; it must be a HardwareResource of HardwareInfos, "
         "or None (on node node1)"),
        ("refuse", f"{WHERE}.configs[1].port", "is not plugged in (on node node1)"),
        ("raise", WHERE, "LookingArm.enumerate raised OSError for node 1: no bus (on node node1)"),
    ],
)  # fmt: skip
def test_error_of_a_hardware_type_names_its_node(two_nodes, mode, path, message):
    config = section({"node_rank": 0, "port": "q"}, ARM, **with_variables(ARM_MODE=mode))
    with pytest.raises(ConfigError) as caught:
        two_nodes.cluster(cluster_cfg=config)
    assert message in str(caught.value)
    assert caught.value.path == path


def test_hardware_type_that_hangs_is_ended(two_nodes, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster_hardware, "LIMIT_S", 12.0)  # it must get as far as to hang
    marker = tmp_path / "pid"
    config = section(ARM, **with_variables(ARM_MODE="hang", ARM_PID_FILE=str(marker)))
    with pytest.raises(ConfigError, match=r"gave no answer within 12 s in _misbehave; it was killed"):
        two_nodes.cluster(cluster_cfg=config)
    assert not Path(f"/proc/{marker.read_text()}").exists()


def test_missing_interpreter_of_a_node_is_named(two_nodes):
    lost = {"env_configs": [{"node_ranks": 1, "python_interpreter_path": "/nowhere/python"}]}
    with pytest.raises(ConfigError, match=r"node node1 cannot say .*: interpreter /nowhere/python does not exist"):
        two_nodes.cluster(cluster_cfg=section(ARM, **lost))


def test_hardware_type_that_a_node_lacks_is_an_error(two_nodes, monkeypatch, tmp_path):
    """Node 1's interpreter has no such module: its path is the driver's, less the directory of the module."""
    monkeypatch.setattr(cluster_hardware, "import_paths", list)
    with pytest.raises(ConfigError) as caught:
        two_nodes.cluster(cluster_cfg=section({"node_rank": 0}, ARM, env_configs=[
            {"node_ranks": 0, "env_vars": [{"PYTHONPATH": HERE}]},
        ]))  # fmt: skip
    assert caught.value.path == f"{WHERE}.type"
    text = str(caught.value)
    assert (
        "node node1 does not know hardware type 'LookingArm'. Not loaded there: module looking_hardware cannot" in text
    )
    assert "Install the package that registers it" in text
    assert "set RLINF_EXT_MODULE to its module for that node's agentd" in text


def test_hardware_type_is_loaded_from_the_node_groups_environment(two_nodes, monkeypatch):
    """RLINF_EXT_MODULE of the group's environment, where the driver's own paths lead nowhere."""
    monkeypatch.setattr(cluster_hardware, "import_paths", list)
    monkeypatch.setattr(cluster_hardware, "_extensions", lambda kind: [])
    known = with_variables(PYTHONPATH=HERE, RLINF_EXT_MODULE="looking_hardware")
    with two_nodes.cluster(cluster_cfg=section(ARM, **known)) as cluster:
        assert [info.identity for info in infos(cluster)[1]] == ["p"]


def test_a_worker_where_the_module_is_missing_says_what_to_install(two_nodes, monkeypatch):
    with two_nodes.cluster(cluster_cfg=section(ARM)) as cluster:
        monkeypatch.setattr(launcher, "import_paths", list)
        strategy = FlexiblePlacementStrategy([[0]], "lab")
        group = Mover.create_group().launch(cluster, name="movers", placement_strategy=strategy, start_method="spawn")
        with pytest.raises(WorkerStartError) as caught:
            group.control.wait_ready(pace.PATIENCE_S)
    text = str(caught.value)
    assert "the driver has loaded module looking_hardware for the hardware of this worker, which" in text
    assert "on node1 cannot: module looking_hardware cannot be loaded: ModuleNotFoundError" in text
    assert "Install the package that has module looking_hardware there" in text


def test_plan_enumerates_hardware_on_the_nodes(two_nodes, tmp_path):
    config = section(**with_variables(ARM_PORTS="/dev/a,/dev/b", PYTHONPATH=HERE, RLINF_EXT_MODULE="looking_hardware"))
    config["node_groups"][0]["node_ranks"] = 1
    config["component_placement"] = {"mover": {"node_group": "lab", "placement": "0-1"}}
    file = tmp_path / "conf.json"
    file.write_text(json.dumps({"cluster": config}))  # JSON is YAML
    planned = CliRunner(env=two_nodes.driver_env).invoke(plan, [str(file)])
    assert planned.exit_code == 0, planned.output
    assert "mover: 2 processes on lab (0-1)" in planned.output
    config["node_groups"][0]["env_configs"] = with_variables(ARM_MODE="abort", PYTHONPATH=HERE)["env_configs"]
    config["node_groups"][0]["env_configs"][0]["env_vars"].append({"RLINF_EXT_MODULE": "looking_hardware"})
    file.write_text(json.dumps({"cluster": config}))
    failed = CliRunner(env=two_nodes.driver_env).invoke(plan, [str(file)])
    assert "node node1 cannot say which LookingArm it has: " in str(failed.exception)


def test_agentd_that_dies_during_the_enumeration_is_reported_as_lost():
    lost = r"hardware: node node1 .* was lost while it looked for its LookingArm"
    options = pace.timers(beat_s=0.2, lease_s=3)
    with LocalCluster(num_nodes=2, options=options) as local, pytest.raises(NodeLostError, match=lost):
        local.cluster(cluster_cfg=section(ARM, **with_variables(ARM_MODE="agent")))


async def test_cancelled_driver_ends_the_enumeration(two_nodes, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster_hardware, "LIMIT_S", 600.0)  # that is not what ends it
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    config = section(ARM, **with_variables(ARM_MODE="hang", ARM_PID_FILE=str(pipe)))

    async def connect() -> None:
        await two_nodes.connect(cluster_cfg=config)

    connecting = asyncio.ensure_future(connect())
    pid = int(await asyncio.to_thread(pipe.read_text))
    pidfd = os.pidfd_open(pid)
    try:
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert await asyncio.to_thread(select.select, [pidfd], [], [], pace.PATIENCE_S) != ([], [], [])
    finally:
        os.close(pidfd)


SCRIPT = """
    import os, sys
    from dataclasses import dataclass
    from rlinf_actors import Cluster, FlexiblePlacementStrategy, Hardware, HardwareConfig, HardwareInfo
    from rlinf_actors import HardwareResource, NodeHardwareConfig, Worker

    @NodeHardwareConfig.register_hardware_config("ScriptArm")
    @dataclass
    class Config(HardwareConfig):
        port: str

    @dataclass
    class Info(HardwareInfo):
        port: str
        found_by: int

    @Hardware.register()
    class ScriptArm(Hardware):
        HW_TYPE = "ScriptArm"

        @classmethod
        def enumerate(cls, node_rank, configs=None):
            return HardwareResource("ScriptArm", [Info("ScriptArm", "v1", one.port, os.getpid()) for one in configs])

    class Env(Worker):
        def port(self):
            return self.hardware_infos[0].port

    hardware = {"type": "ScriptArm", "configs": [{"node_rank": 0, "port": "p"}]}
    group = {"label": "lab", "node_ranks": 0, "hardware": hardware}
    with Cluster(cluster_cfg={"num_nodes": 1, "node_groups": [group]}) as cluster:
        info, = cluster.get_node_info(0).get_hardware_infos("ScriptArm")
        assert info.found_by == os.getpid()
        print(Env.create_group().launch(cluster, FlexiblePlacementStrategy([[0]], "lab")).port().wait())
"""


def test_type_registered_by_the_script_is_enumerated_on_the_scripts_machine(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "['p']\n"), done.stderr


async def test_type_registered_by_the_script_is_an_error_on_another_machine(monkeypatch):
    monkeypatch.setattr(LookingArm, "__module__", "__main__")
    state = NodeState(NodeReport("id", "far", "10.0.0.9", "another host", 8, 0, "3.11", "py"), "inc", 0, "ready", 0.0)
    lab = section({"node_rank": 0, "port": "/dev/ttyA"})
    config = ClusterConfig.from_any(lab, hardware_types=registry.hardware_types())

    async def unknown(asked):
        return Enumerated(HardwareAnswer(kind="unregistered"))

    with pytest.raises(ConfigError, match=r"\.hardware\.type: 'LookingArm' is registered by the script .* node far"):
        await cluster_hardware.ask_nodes(config, [state], unknown, "this host")


async def test_one_robot_that_two_nodes_name_is_refused():
    state = [
        NodeState(NodeReport(f"id{rank}", "far", "10.0.0.9", "h", 8, 0, "3.11", "py"), "inc", rank, "ready", 0.0)
        for rank in range(2)
    ]
    entries = [{"node_rank": rank, "robot_ip": "10.1.1.1"} for rank in range(2)]
    lab = {"label": "lab", "node_ranks": "0-1", "hardware": {"type": "Franka", "configs": entries}}
    config = ClusterConfig.from_any({"num_nodes": 2, "node_groups": [lab]}, hardware_types=registry.hardware_types())

    async def found(asked):
        arm = FrankaConfig(asked.question.node_rank, robot_ip="10.1.1.1")
        return Enumerated(HardwareAnswer([piece_of(FrankaHWInfo("Franka", "Franka", arm))]))

    with pytest.raises(ConfigError, match=r"Franka 0 of node 0 and Franka 0 of node 1 are the same robot, 10\.1\.1\.1"):
        await cluster_hardware.ask_nodes(config, state, found)
