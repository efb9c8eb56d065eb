"""Hardware types of users: registering, configuring, enumerating, loading the module that does it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.configured import describe_hardware, enumerate_type, without_types
from rlinf_actors.hardware.extensions import load_module
from rlinf_actors.hardware.registry import Hardware, NodeHardwareConfig, hardware_types, is_exclusive, lookup
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareConfig, HardwareInfo, HardwareResource
from rlinf_actors.model.node import NodeInfo

pytestmark = pytest.mark.usefixtures("registries")


@dataclass
class MyArmConfig(HardwareConfig):
    robot_ip: str
    cameras: list[str] | None = None
    speed: float = 1.0


@dataclass
class MyArmInfo(HardwareInfo):
    config: MyArmConfig


class MyArm(Hardware):
    HW_TYPE = "MyArm"

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[Any] | None = None) -> HardwareResource | None:
        if not configs:
            return None
        assert all(config.node_rank == node_rank for config in configs)
        return HardwareResource(cls.HW_TYPE, [MyArmInfo(cls.HW_TYPE, "v2", config) for config in configs])


def register() -> None:
    NodeHardwareConfig.register_hardware_config("MyArm")(MyArmConfig)
    Hardware.register()(MyArm)


def section(*configs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    hardware = {"type": "MyArm", "configs": list(configs)}
    return {"num_nodes": 3, "node_groups": [{"label": "arms", "node_ranks": "1-2", "hardware": hardware, **changes}]}


def parse(*configs: dict[str, Any], **changes: Any) -> ClusterConfig:
    return ClusterConfig.from_any(section(*configs, **changes), hardware_types=hardware_types())


def nodes() -> list[NodeInfo]:
    gpu = HardwareResource("NV_GPU", [AcceleratorInfo("NV_GPU", "H100")])
    return [NodeInfo(node_rank=rank, hardware_resources=[gpu]) for rank in range(3)]


def test_from_the_configuration_to_the_nodes() -> None:
    register()
    config = parse(
        {"node_rank": 2, "robot_ip": "10.0.0.2"},
        {"node_rank": 1, "robot_ip": "10.0.0.1", "cameras": ["7"], "speed": 2},
        {"node_rank": 2, "robot_ip": "10.0.0.3"},
    )
    given = nodes()
    found = describe_hardware(config, given)
    assert [node.get_hw_resource_count("MyArm") for node in found] == [0, 1, 2]
    assert [node.num_accelerators for node in found] == [1, 1, 1]
    assert [info.config.robot_ip for info in found[2].get_hardware_infos("MyArm")] == ["10.0.0.2", "10.0.0.3"]
    first = found[1].get_hardware_infos("MyArm")[0]
    assert isinstance(first, MyArmInfo)
    assert first.config == MyArmConfig(1, "10.0.0.1", ["7"], 2.0)
    assert all(len(node.hardware_resources) == 1 for node in given)  # nothing that was passed in changed


def test_pieces_listed_by_a_description_stay() -> None:
    register()
    listed = HardwareResource("MyArm", [HardwareInfo("MyArm", "?")] * 3)
    given = [NodeInfo(node_rank=1, hardware_resources=[listed])]
    assert describe_hardware(parse({"node_rank": 1, "robot_ip": "10.0.0.1"}), given) == given


def test_a_type_that_no_package_here_knows_is_left_alone() -> None:
    config = ClusterConfig.from_any(section({"node_rank": 1, "anything": 1}))
    assert describe_hardware(config, nodes()) == nodes()


def test_faults_of_a_described_node_count_the_sections_entries() -> None:
    register()
    config = ClusterConfig.from_any(section({"node_rank": 2, "robot_ip": "x"}, {"node_rank": 1, "robot_ip": 7}))
    with pytest.raises(ConfigError, match="is 7; it must be a text") as caught:
        describe_hardware(config, nodes())
    assert caught.value.path == "cluster.node_groups[0].hardware.configs[1].robot_ip"


def test_a_config_without_its_types_is_the_same_for_both() -> None:
    register()
    entry = {"node_rank": 1, "robot_ip": "10.0.0.1", "cameras": None, "speed": 1.0}
    assert without_types(parse(entry)) == ClusterConfig.from_any(section(entry))


@pytest.mark.parametrize(
    ("entry", "path", "message"),
    [
        ({"node_rank": 1, "robot_pi": "x"}, "robot_pi", "unknown key 'robot_pi'; did you mean 'robot_ip'?"),
        ({"node_rank": 1}, "", "has no robot_ip, which MyArmConfig needs"),
        ({"node_rank": 1, "robot_ip": 7}, "robot_ip", "is 7; it must be a text (quote it)"),
        ({"node_rank": 1, "robot_ip": "x", "cameras": [5]}, "cameras[0]", "is 5; it must be a text (quote it)"),
        ({"node_rank": 1, "robot_ip": "x", "speed": "fast"}, "speed", "is 'fast'; it must be a number"),
    ],
)
def test_faults_of_a_config_have_their_path(entry: dict[str, Any], path: str, message: str) -> None:
    register()
    with pytest.raises(ConfigError) as caught:
        parse(entry)
    where = "cluster.node_groups[0].hardware.configs[0]"
    assert caught.value.path.startswith(f"{where}.{path}" if path else where)
    assert message in str(caught.value)


def test_an_unknown_type_names_the_nearest() -> None:
    register()
    with pytest.raises(ConfigError, match="no hardware type 'MyArms'; did you mean 'MyArm'"):
        lookup("MyArms")
    with pytest.raises(ConfigError, match="no hardware type 'MyArms'"):
        NodeHardwareConfig("MyArms", [{}])
    assert lookup("MyArm") is MyArmConfig


def test_node_hardware_config_makes_instances() -> None:
    register()
    ready = MyArmConfig(1, "10.0.0.2")
    made = NodeHardwareConfig("MyArm", [{"node_rank": 0, "robot_ip": "10.0.0.1"}, ready])
    assert made.configs == [MyArmConfig(0, "10.0.0.1"), ready]
    with pytest.raises(ConfigError) as caught:
        NodeHardwareConfig("MyArm", [{"node_rank": 0, "robot_ip": "10.0.0.1", "sped": 2}])
    assert caught.value.path == "configs[0].sped"


def test_a_class_without_a_type_name_is_asked_too() -> None:
    NodeHardwareConfig.register_hardware_config("MyArm")(MyArmConfig)

    @Hardware.register()
    class Finder(Hardware):
        @classmethod
        def enumerate(cls, node_rank: int, configs: Sequence[Any] | None = None) -> HardwareResource | None:
            return MyArm.enumerate(node_rank, configs)

    found = enumerate_type("MyArm", 1, [MyArmConfig(1, "10.0.0.1")])
    assert found is not None
    assert found.count == 1
    assert enumerate_type("Other", 1, [MyArmConfig(1, "10.0.0.1")]) is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("no answer"), "Odd.enumerate raised RuntimeError for node 1: no answer"),
        (["arm"], r"Odd.enumerate returned \['arm'\]; it must be a HardwareResource"),
        (HardwareResource("MyArm", ["arm"]), "it must be a HardwareResource of HardwareInfos"),  # type: ignore[list-item]
        (HardwareResource("Other", []), "Odd.enumerate returned pieces of type 'Other', not 'MyArm'"),
    ],
)
def test_an_enumerate_that_fails_is_a_config_error(result: Any, message: str) -> None:
    @Hardware.register()
    class Odd(Hardware):
        HW_TYPE = "MyArm"

        @classmethod
        def enumerate(cls, node_rank: int, configs: Sequence[Any] | None = None) -> HardwareResource | None:
            if isinstance(result, Exception):
                raise result
            return result  # type: ignore[no-any-return]

    NodeHardwareConfig.register_hardware_config("MyArm")(MyArmConfig)
    with pytest.raises(ConfigError, match=message) as caught:
        describe_hardware(parse(), nodes())
    assert caught.value.path == "cluster.node_groups[0].hardware"


def test_invalid_registrations_are_refused() -> None:
    register()
    register()  # the same classes again: a register() that runs twice
    with pytest.raises(ValueError, match=r"'MyArm' has a config class already: .*MyArmConfig"):

        @NodeHardwareConfig.register_hardware_config("MyArm")
        @dataclass
        class Another(HardwareConfig):
            pass

    with pytest.raises(ValueError, match="'NV_GPU' is a type of accelerator"):
        NodeHardwareConfig.register_hardware_config("NV_GPU")(MyArmConfig)
    with pytest.raises(TypeError, match="is not a subclass of HardwareConfig"):
        NodeHardwareConfig.register_hardware_config("X")(int)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="put @dataclass below the registration"):

        @dataclass
        @NodeHardwareConfig.register_hardware_config("X")
        class Reversed(HardwareConfig):
            more: int = 0

    with pytest.raises(TypeError, match="is not a subclass of Hardware"):
        Hardware.register()(int)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"Empty has no classmethod enumerate\(node_rank, configs\)"):

        @Hardware.register()
        class Empty(Hardware):
            pass


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of a module lab_ext that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the tests' files differ within one second
    monkeypatch.delitem(sys.modules, "lab_ext", raising=False)
    return tmp_path / "lab_ext.py"


def test_an_extension_registers_once(extension: Path) -> None:
    extension.write_text("calls = []\ndef register(): calls.append(1)\n")
    load_module("lab_ext")
    load_module("lab_ext")
    assert sys.modules["lab_ext"].calls == [1]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("lab_missing", "", "RLINF_EXT_MODULE: there is no module 'lab_missing' on this interpreter's path"),
        ("lab_missing.ext", "", "RLINF_EXT_MODULE: there is no module 'lab_missing' on"),
        (
            "lab_ext",
            "import lab_sdk",
            "RLINF_EXT_MODULE: module 'lab_ext' cannot be imported: No module named 'lab_sdk'",
        ),
        ("lab_ext", "1 / 0", "module 'lab_ext' cannot be imported: ZeroDivisionError: division by zero"),
        ("lab_ext", "def register(:", "module 'lab_ext' cannot be imported: SyntaxError"),
        ("lab_ext", "", r"module 'lab_ext' has no function register\(\)"),
        (
            "lab_ext",
            "def register(): raise OSError('no bus')",
            r"register\(\) of module 'lab_ext' raised OSError: no bus",
        ),
    ],
)
def test_an_extension_that_fails_says_how(extension: Path, name: str, code: str, message: str) -> None:
    extension.write_text(code + "\n")
    with pytest.raises(ConfigError, match=message):
        load_module(name)


def test_a_class_without_a_type_may_be_shared() -> None:
    @Hardware.register()
    class Lamp(Hardware):
        EXCLUSIVE = False

        @classmethod
        def enumerate(cls, node_rank: int, configs: Sequence[Any] | None = None) -> HardwareResource | None:
            return HardwareResource("Lamp", [HardwareInfo("Lamp", "bright")])

    assert not is_exclusive("Lamp")
    assert not is_exclusive("Bulb")  # which only Lamp may find
    register()
    assert is_exclusive("MyArm")
