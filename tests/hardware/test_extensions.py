"""Packages that register hardware types: found by their entry points, loaded when needed, broken one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware import extensions
from rlinf_actors.hardware.extensions import ACCELERATORS, ROBOTS
from rlinf_actors.hardware.probe import run_probe
from rlinf_actors.hardware.registry import registered_types
from rlinf_actors.settings import EXT_MODULE
from rlinf_actors.wire.values import Extension

pytestmark = pytest.mark.usefixtures("registries")

ARM = """
from dataclasses import dataclass
from rlinf_actors import Hardware, HardwareConfig, HardwareInfo, HardwareResource, NodeHardwareConfig

@NodeHardwareConfig.register_hardware_config("{kind}")
@dataclass
class {kind}Config(HardwareConfig):
    port: str = ""

@Hardware.register()
class {kind}(Hardware):
    HW_TYPE = "{kind}"

    @classmethod
    def enumerate(cls, node_rank, configs=None):
        return HardwareResource(cls.HW_TYPE, [HardwareInfo(cls.HW_TYPE, c.port) for c in configs or ()])
"""
AS_FUNCTION = "def register():\n" + "\n".join("    " + line for line in ARM.splitlines())

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package with one entry point on the import path, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(module: str, code: str, value: str, group: str = ROBOTS) -> None:
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.delitem(sys.modules, module, raising=False)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{module} = {value}\n")

    return make


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (ARM, "lab_pkg"),
        (ARM, "lab_pkg:TestArm"),
        (AS_FUNCTION, "lab_pkg:register"),
        (AS_FUNCTION, "lab_pkg"),
        (f"class Plugin:\n    @staticmethod\n    def go():\n        import lab_inner\n{'':>4}", "lab_pkg:Plugin.go"),
    ],
)
def test_an_entry_point_names_a_module_class_or_function(
    install: Install, tmp_path: Path, code: str, value: str
) -> None:
    (tmp_path / "lab_inner.py").write_text(ARM.format(kind="TestArm"))
    sys.modules.pop("lab_inner", None)
    install("lab_pkg", code.format(kind="TestArm"), value)
    assert extensions.load_types(["TestArm"]) == []
    assert registered_types() == ["TestArm"]
    assert extensions.loaded() == [Extension(value, ROBOTS, "lab_pkg 1.2")]


def test_a_broken_package_costs_only_its_own_types(install: Install) -> None:
    install("lab_broken", "import lab_sdk", "lab_broken")
    install("lab_good", ARM.format(kind="GoodArm"), "lab_good")
    assert extensions.load_types(["GoodArm"]) == []
    assert extensions.load_types(["LostArm"]) == [
        "entry point lab_broken (rlinf_actors.robots) of package lab_broken 1.2 cannot be loaded: "
        "ModuleNotFoundError: No module named 'lab_sdk'"
    ]


def test_a_known_type_starts_no_search_for_packages(install: Install) -> None:
    install("lab_pkg", "raise SystemError('imported')", "lab_pkg")
    assert extensions.load_types(["Franka"]) == []
    assert extensions.loaded() == []
    assert "lab_pkg" not in sys.modules


def test_without_an_entry_point_of_ours_metadata_is_not_read(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("lab_pkg", "", "lab_pkg", group="console_scripts")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)  # whoever imports it fails
    assert extensions.installed() == []


def test_vendors_have_a_group_of_their_own(install: Install) -> None:
    vendor = """
from rlinf_actors import AcceleratorFacts, AcceleratorUtil, FoundAccelerators

FACTS = AcceleratorFacts("LAB_TPU_DEVICES", "", "tpu", "")

@AcceleratorUtil.register_accelerator("LAB_TPU", FACTS, devices=("/dev/null",))
def find(environ):
    return FoundAccelerators()
"""
    install("lab_tpu", vendor, "lab_tpu", group=ACCELERATORS)
    extensions.load_accelerators(["NV_GPU"])
    assert "lab_tpu" not in sys.modules
    extensions.load_accelerators(["NV_GPU", "LAB_TPU"])
    assert extensions.loaded() == [Extension("lab_tpu", ACCELERATORS, "lab_tpu 1.2")]


def test_a_worker_loads_the_drivers_extensions(install: Install) -> None:
    install("lab_pkg", ARM.format(kind="TestArm"), "lab_pkg")
    extensions.load_types(["TestArm"])
    told = extensions.providers(["lab_pkg", "rlinf_actors.model.hardware", "__main__", "other_pkg.arms"])
    assert told == [Extension("lab_pkg", ROBOTS, "lab_pkg 1.2"), Extension("other_pkg.arms")]
    extensions.load_driver_extensions(told[:1], "here")
    with pytest.raises(ConfigError) as caught:
        extensions.load_driver_extensions(told, "/usr/bin/python3 on node7")
    assert str(caught.value) == (
        "the driver has loaded module other_pkg.arms for the hardware of this worker, which /usr/bin/python3 on node7 "
        "cannot: module other_pkg.arms cannot be loaded: ModuleNotFoundError: No module named 'other_pkg'. Install the "
        "package that has module other_pkg.arms there, or name an interpreter that has it (env_configs: "
        "python_interpreter_path)"
    )


def test_a_node_loads_extensions_until_it_knows_the_type(install: Install) -> None:
    install("lab_pkg", ARM.format(kind="TestArm"), "lab_pkg")
    assert extensions.load_for("TestArm", [Extension("missing_pkg", ROBOTS, "missing 1.0")], "lab_absent") == []
    faults = extensions.load_for("OtherArm", [Extension("missing_pkg", ROBOTS, "missing 1.0")], "lab_absent")
    assert faults[0].startswith(f"{EXT_MODULE}: there is no module 'lab_absent' on this interpreter's path")
    assert faults[1].startswith("entry point missing_pkg (rlinf_actors.robots) of package missing 1.0 cannot be loaded")


def test_a_cluster_asks_for_a_type_of_an_installed_package(install: Install) -> None:
    from rlinf_actors.cluster.cluster_nodes import read_config

    install("lab_pkg", ARM.format(kind="TestArm"), "lab_pkg")
    install("lab_broken", "1 / 0", "lab_broken")
    hardware = {"type": "TestArm", "configs": [{"node_rank": 0, "port": "p"}]}
    config = {"num_nodes": 1, "node_groups": [{"label": "lab", "node_ranks": 0, "hardware": hardware}]}
    read = read_config({"cluster": config})
    assert isinstance(read, ClusterConfig)
    assert read.node_groups[0].hardware is not None
    assert type(read.node_groups[0].hardware.configs[0]).__name__ == "TestArmConfig"
    hardware["type"] = "LostArm"
    with pytest.raises(ConfigError, match=r"no hardware type 'LostArm'.* Not loaded: entry point lab_broken") as caught:
        read_config(config)
    assert caught.value.path == "cluster.node_groups[0].hardware.type"


async def test_the_probe_loads_each_package_in_a_process_of_its_own(install: Install, tmp_path: Path) -> None:
    install("lab_crash", "import os\nos.abort()", "lab_crash")
    install("lab_good", ARM.format(kind="GoodArm"), "lab_good")
    environ = {"PYTHONPATH": str(tmp_path), "RLINF_ACTORS_PROBE_ROOT": str(tmp_path)}
    report = await run_probe(env=environ)
    assert report.extension_types == ["GoodArm"]
    (fault,) = report.faults
    assert fault.startswith(
        "entry point lab_crash (rlinf_actors.robots) of package lab_crash 1.2 crashed its process (SIGABRT)"
    )
