"""The configurations of the built-in robots: their fields, what they refuse, what they remember."""

from __future__ import annotations

import copy
import dataclasses

import pytest

import rlinf_actors as ra
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.registry import hardware_classes, hardware_types, lookup, registered_types
from rlinf_actors.hardware.robots.robot_config import TcpPort, host_of

TYPES = ("Franka", "DualFranka", "GimArm", "DOSW1", "Turtle2")


def parsed(kind, **values):
    groups = [{"label": "lab", "node_ranks": 0, "hardware": {"type": kind, "configs": [{"node_rank": 0, **values}]}}]
    config = ClusterConfig.from_any(
        {"cluster": {"num_nodes": 1, "node_groups": groups}}, hardware_types=hardware_types()
    )
    return config.node_groups[0].hardware.configs[0]


@pytest.mark.parametrize("kind", TYPES)
def test_a_built_in_type_is_known_without_registration(kind):
    assert lookup(kind) is hardware_types()[kind] is getattr(ra, f"{kind}Config")
    assert [cls.HW_TYPE for cls in hardware_classes(kind)] == [kind]
    assert kind not in registered_types()


def test_listing_the_names_imports_no_type():
    import subprocess
    import sys

    code = (
        "import sys; from rlinf_actors.hardware.registry import hardware_types; print(sorted(hardware_types()));"
        "print([name for name in sys.modules if 'robots' in name])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [str(sorted(TYPES)), "[]"]


def test_defaults_are_those_that_the_makers_use():
    robot = parsed("DOSW1", robot_url="10.0.0.5")
    assert (robot.left_arm_port, robot.right_arm_port) == (50051, 50053)
    assert (robot.left_lead_port, robot.right_lead_port) == (50050, 50052)
    arm = parsed("Franka", robot_ip="10.0.0.1")
    assert (arm.camera_type, arm.gripper_type, arm.gripper_connection) == ("realsense", "franka", None)
    assert (arm.controller_node_rank, arm.disable_validate, arm.camera_serials) == (None, False, None)
    assert parsed("GimArm", can_interface="can0").enable_gripper is True


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("Franka", {"robot_ip": "10.0.0.256"}, r"configs\[0\].*robot_ip.*10.0.0.256.*IP address or a host name"),
        ("Franka", {"robot_ip": "arm..local"}, "IP address or a host name"),
        ("Franka", {"robot_ip": "-" * 200}, "IP address or a host name"),
        ("Franka", {"robot_ip": "http://x"}, "IP address or a host name"),
        ("Franka", {"camera_type": "webcam"}, "realsense, zed, lumos"),
        ("Franka", {"gripper_type": "panda"}, "franka, robotiq"),
        ("Franka", {"camera_serials": "123"}, "it must be a list of texts"),
        ("Franka", {"camera_serials": ["1", "1"]}, "camera 1 twice"),
        ("Franka", {"camera_serial": ["1"]}, "did you mean 'camera_serials'"),
        ("Franka", {"controller_node_rank": -1}, "whole number from 0"),
        ("DualFranka", {"left_robot_ip": "a", "right_robot_ip": "a"}, "two arms"),
        ("DualFranka", {"left_camera_serials": ["1"], "base_camera_serials": ["1"]}, "as does left_camera_serials"),
        ("DualFranka", {"right_gripper_type": "x"}, "right_gripper_type.*franka, robotiq"),
        ("GimArm", {"can_interface": "can 0"}, "name of a network interface"),
        ("GimArm", {"can_interface": "averyveryverylongname"}, "name of a network interface"),
        ("GimArm", {"enable_gripper": "maybe"}, "enable_gripper"),
        ("DOSW1", {"robot_url": "http://"}, "host, host:port or URL"),
        ("DOSW1", {"robot_url": "arm:port"}, "host, host:port or URL"),
        ("DOSW1", {"left_arm_port": 70000}, "from 1 to 65535"),
    ],
)
def test_an_invalid_value_is_refused_with_its_field(kind, values, said):
    with pytest.raises(ConfigError, match=said):
        parsed(kind, **values)


def test_a_gim_arms_gripper_may_be_any():
    assert parsed("GimArm", gripper_type="two-finger").gripper_type == "two-finger"


@pytest.mark.parametrize(
    ("given", "host"),
    [("10.0.0.1", "10.0.0.1"), ("arm.local:80", "arm.local"), ("http://[fe80::1]:8/x", "fe80::1")],
)
def test_the_host_of_an_address(given, host):
    assert host_of(given) == host


def test_given_fields_are_remembered():
    arm = parsed("Franka", robot_ip="10.0.0.1", camera_type="realsense")
    assert arm.as_values() == {"node_rank": 0, "robot_ip": "10.0.0.1", "camera_type": "realsense"}
    again = copy.deepcopy(arm)  # as pickle does
    assert again == arm
    assert again.as_values() == arm.as_values()
    assert arm.lacks("gripper_type")
    assert not arm.lacks("camera_type")
    assert ra.FrankaConfig(3, True).as_values() == {"node_rank": 3, "disable_validate": True}
    assert dataclasses.replace(arm, robot_ip="10.0.0.2").robot_ip == "10.0.0.2"


def test_hardware_driven_by_another_node_is_not_checked_here():
    assert [link.host for link in ra.FrankaConfig(0, robot_ip="a").links()] == ["a"]
    assert ra.FrankaConfig(0, robot_ip="a", controller_node_rank=1).links() == []
    assert ra.GimArmConfig(0, can_interface="can0", controller_node_rank=1).can_interfaces() == {}
    dual = ra.DualFrankaConfig(0, left_robot_ip="a", right_robot_ip="b", left_controller_node_rank=2)
    assert [link.field for link in dual.links()] == ["right_robot_ip"]


def test_a_robotiq_gripper_has_a_device_or_an_address():
    def arm(connection):
        return ra.FrankaConfig(0, robot_ip="a", gripper_type="robotiq", gripper_connection=connection)

    assert arm("/dev/ttyUSB0").devices() == {"gripper_connection": "/dev/ttyUSB0"}
    assert arm("10.0.0.7").links()[1] == TcpPort("gripper_connection", "10.0.0.7", 502)
    assert arm("10.0.0.7:99").links()[1].port == 99
    assert "Robotiq gripper needs" in arm(None).missing()["gripper_connection"]


def test_the_name_of_each_robot_for_people_is_that_of_its_configuration():
    pair = ra.DualFrankaConfig(0, left_robot_ip="a", right_robot_ip="b")
    assert ra.DualFrankaHWInfo("DualFranka", "DualFranka", pair).identity == "a+b"
    assert ra.FrankaHWInfo("Franka", "Franka", ra.FrankaConfig(0, robot_ip="b")).identity == "b"
    assert ra.DOSW1HWInfo("DOSW1", "x", ra.DOSW1Config(0, robot_url="http://arm:80/")).identity == "arm"
