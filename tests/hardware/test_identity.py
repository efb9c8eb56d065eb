"""What tells a robot from all others, whatever a job calls it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlinf_actors import (
    DOSW1Config,
    DualFrankaConfig,
    FrankaConfig,
    GimArmConfig,
    Identity,
    Turtle2Config,
    address_identities,
    device_identity,
)
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.identity import on_its_host
from rlinf_actors.hardware.robots.dosw1 import DOSW1
from rlinf_actors.hardware.robots.franka import DualFranka, Franka
from rlinf_actors.hardware.robots.robot import Robot
from rlinf_actors.hardware.robots.robot_checks import CheckedMachine
from rlinf_actors.hardware.robots.robot_config import RobotConfig
from rlinf_actors.hardware.robots.scan import scan

NAMES = {
    "franka-left": ["10.0.0.5"],
    "franka-left.lab": ["10.0.0.5", "fd00::5"],
    "this-node": ["127.0.1.1"],
    "own-link": ["fe80::1%eth0"],
}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server with NAMES."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: object, *_: object, flags: int = 0, **options: object) -> list:
        known = NAMES.get(host.lower().rstrip(".")) if not flags & socket.AI_NUMERICHOST else None
        if known is None:  # "localhost" is in each machine's table
            numeric = 0 if host == "localhost" else socket.AI_NUMERICHOST
            return real(host, port, type=socket.SOCK_STREAM, flags=flags | numeric)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "::1", "127.0.1.1", "this-node", "::ffff:127.0.0.1", "0.0.0.0", "::"]
)
def test_all_names_of_a_node_for_itself_are_one_host_of_that_node(host: str) -> None:
    assert address_identities(host, 3) == [Identity("localhost", 3)]
    assert address_identities(host, 3, 80) == [Identity("localhost port 80", 3)]
    assert address_identities(host, 4) != address_identities(host, 3)


@pytest.mark.parametrize("host", ["10.0.0.5", "::ffff:10.0.0.5", "franka-left", "FRANKA-left", "franka-left."])
def test_an_address_of_the_network_is_the_same_robot_on_all_nodes(host: str) -> None:
    assert address_identities(host, 3) == address_identities("10.0.0.5", 4) == [Identity("10.0.0.5")]


def test_a_name_with_two_addresses_is_the_robot_at_either() -> None:
    assert address_identities("franka-left.lab", 0) == [Identity("10.0.0.5"), Identity("fd00::5")]
    assert address_identities("FD00:0::5", 0) == [Identity("fd00::5")]


def test_an_address_of_a_link_is_of_the_node() -> None:
    assert address_identities("own-link", 2) == [Identity("fe80::1%eth0", 2)]
    assert address_identities("169.254.3.3", 2) == [Identity("169.254.3.3", 2)]


def test_robots_at_two_ports_are_two() -> None:
    assert address_identities("10.0.0.5", 0, 80) != address_identities("10.0.0.5", 0, 81)


@pytest.mark.parametrize("host", ["franka-right", "a..b", "x" * 64 + ".lab"])
def test_a_name_without_an_address_is_an_error_or_a_name_of_the_node(host: str) -> None:
    with pytest.raises(ConfigError, match=f"is the name '{host}', which has no address here .*: give the numeric") as e:
        address_identities(host, 1, path="configs[0].robot_ip")
    assert e.value.path == "configs[0].robot_ip"
    assert address_identities(f"{host.upper()}.", 1, required=False) == [Identity(host, 1)]


def test_a_node_resolves_no_names_for_another() -> None:
    with pytest.raises(ConfigError, match="is the name 'franka-left', but node 7 drives the robot: give the numeric"):
        address_identities("franka-left", 7, here=False)
    assert address_identities("10.0.0.5", 7, here=False) == [Identity("10.0.0.5")]
    assert address_identities("127.0.0.1", 7, here=False) == [Identity("localhost", 7)]


def test_a_device_is_one_by_all_its_links(tmp_path: Path) -> None:
    (tmp_path / "ttyUSB0").touch()
    (tmp_path / "by-id").symlink_to(tmp_path / "ttyUSB0")
    device = Identity(os.path.realpath(tmp_path / "ttyUSB0"), 1)
    assert device_identity(str(tmp_path / "by-id"), 1) == device_identity(str(tmp_path / "ttyUSB0"), 1) == device
    assert device_identity("/dev/none", 1) == Identity("/dev/none", 1)


def test_a_nodes_own_address_is_its_loopback_for_all_nodes() -> None:
    ranks = {"10.0.0.9": 2, "fd00::9": 2}
    for host in ("10.0.0.9", "fd00::9"):
        assert on_its_host(*address_identities(host, 0), ranks, {}) == Identity("localhost", 2)
        assert on_its_host(*address_identities(host, 0, 80), ranks, {}) == Identity("localhost port 80", 2)
    for other in (Identity("10.0.0.8"), Identity("10.0.0.9", 1), Identity("10.0.0.99 port 80")):
        assert on_its_host(other, ranks, {}) == other


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FrankaConfig(1, robot_ip="franka-left"), [Identity("10.0.0.5")]),
        (FrankaConfig(1, robot_ip="127.0.0.1", controller_node_rank=2), [Identity("localhost", 2)]),
        (FrankaConfig(1, controller_node_rank=2), [Identity("Franka", 2)]),
        (FrankaConfig(1, True, robot_ip="franka-right"), [Identity("franka-right", 1)]),
        (
            DualFrankaConfig(1, left_robot_ip="franka-left", right_robot_ip="::1", right_controller_node_rank=2),
            [Identity("10.0.0.5"), Identity("localhost", 2)],
        ),
        (GimArmConfig(1, can_interface="can1"), [Identity("can1", 1)]),
        (GimArmConfig(1, can_interface="can1", controller_node_rank=0), [Identity("can1", 0)]),
        (
            DOSW1Config(1, robot_url="http://localhost:80"),
            [Identity("localhost port 50051", 1), Identity("localhost port 50053", 1)],
        ),
        (Turtle2Config(1), [Identity("Turtle2", 1)]),
    ],
)
def test_the_identity_of_each_robot(config: RobotConfig, expected: list[Identity]) -> None:
    assert config.identities() == expected


@pytest.mark.parametrize(
    ("kind", "configs", "path", "said"),
    [
        (
            Franka,
            [FrankaConfig(0, True, robot_ip="10.0.0.5"), FrankaConfig(0, robot_ip="franka-right")],
            "configs[1].robot_ip",
            "is the name 'franka-right', which has no address here",
        ),
        (
            DualFranka,
            [DualFrankaConfig(0, True, left_robot_ip="franka-left", right_robot_ip="10.0.0.5")],
            "configs[0].right_robot_ip",
            "is 10.0.0.5, which is the arm of left_robot_ip",
        ),
        (
            DOSW1,
            [DOSW1Config(0, False, robot_url="robot")],
            "configs[0].robot_url",
            "is the name 'robot', which has no",
        ),
    ],
)
def test_an_error_names_the_entry(kind: type[Robot], configs: list[RobotConfig], path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        kind.enumerate(0, configs)
    assert caught.value.path == path


def test_enumeration_says_which_robot_each_is() -> None:
    found = Franka.enumerate(
        0, [FrankaConfig(0, True, robot_ip="localhost"), FrankaConfig(0, True, robot_ip="10.0.0.5")]
    )
    assert found is not None
    assert [info.identities for info in found.infos] == [[Identity("localhost", 0)], [Identity("10.0.0.5")]]
    assert [info.identity for info in found.infos] == ["localhost", "10.0.0.5"]


def test_scan_says_which_robot_each_is_or_why_not(tmp_path: Path) -> None:
    machine = CheckedMachine(tmp_path, tmp_path)
    off = {"DISABLE_VALIDATE": "true"}
    found = scan({**off, "CAN_INTERFACE": "can1", "ROBOT_IP": "franka-left", "ROBOT_URL": "robot"}, machine)
    assert {one.type: one.identity for one in found.robots} == {
        "Franka": ["10.0.0.5"],
        "GimArm": ["can1 of this node"],
        "DOSW1": ["robot port 50051 of this node", "robot port 50053 of this node"],
    }
    (fault,) = scan({"ROBOT_IP": "franka-right"}, machine).faults
    assert fault.startswith("Franka: robot_ip: is the name 'franka-right', which has no address here")
