"""What a node checks of its robots: fake /sys trees, real sockets, SDKs that are there, missing, or broken."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_actors import DOSW1Config, FrankaConfig, GimArmConfig, HardwareResource, Turtle2Config
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.robots import robot_checks
from rlinf_actors.hardware.robots.franka import Franka
from rlinf_actors.hardware.robots.gim_arm import GimArm
from rlinf_actors.hardware.robots.robot_checks import CheckedMachine, can_faults, faults_of, link_faults
from rlinf_actors.hardware.robots.robot_config import TcpPort
from rlinf_actors.hardware.robots.turtle2 import Turtle2


def add_camera(sys_root: Path, number: int, serial: str, vendor: str = "8086", name: str = "RealSense D435") -> None:
    """A camera as sysfs has it: a USB device, its interface, and the video device that links to the interface."""
    device = sys_root / f"devices/pci0000:00/usb1/1-{number}"
    interface = device / f"1-{number}:1.0"
    interface.mkdir(parents=True)
    (device / "idVendor").write_text(f"{vendor}\n")
    (device / "product").write_text(f"{name}\n")
    if serial:
        (device / "serial").write_text(f"{serial}\n")
    video = sys_root / f"class/video4linux/video{number}"
    video.mkdir(parents=True)
    (video / "device").symlink_to(interface)


def add_interface(sys_root: Path, name: str, kind: int = 280, flags: int = 0x1, operstate: str = "up") -> None:
    directory = sys_root / "class/net" / name
    directory.mkdir(parents=True)
    for file, text in (("type", kind), ("flags", hex(flags)), ("operstate", operstate)):
        (directory / file).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "dev").mkdir()
    return CheckedMachine(tmp_path / "sys", tmp_path / "dev", 5.0)


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed():
    """A port of this machine that nothing listens on: bound, so that nobody else gets it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class TestLinks:
    def test_a_listening_or_refusing_host_is_reachable(self, listening, closed):
        links = [
            TcpPort("a", "127.0.0.1", listening),
            TcpPort("b", "127.0.0.1", closed),
            TcpPort("c", "localhost", listening),
        ]
        assert link_faults(links, 5.0) == []

    def test_a_server_that_must_listen(self, closed):
        (fault,) = link_faults([TcpPort("left_arm_port", "127.0.0.1", closed, True)], 5.0)
        assert fault.field == "left_arm_port"
        assert f"port {closed} refuses the connection: is the robot's server running?" in fault.text

    def test_silence_is_named_for_each_that_is_silent(self, listening):
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)
            port = silent.getsockname()[1]
            fillers = [socket.socket() for _ in range(3)]
            for filler in fillers:  # the backlog is full then: further SYNs are dropped
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            links = [
                TcpPort("a", "127.0.0.1", port),
                TcpPort("ok", "127.0.0.1", listening),
                TcpPort("b", "127.0.0.1", port),
            ]
            faults = link_faults(links, 0.3)
            for filler in fillers:
                filler.close()
        assert [fault.field for fault in faults] == ["a", "b"]
        assert "does not answer within 0.3 s: is it switched on" in faults[0].text

    def test_an_address_that_no_way_leads_to(self):
        (fault,) = link_faults([TcpPort("robot_ip", "255.255.255.255", 1)], 5.0)
        assert "255.255.255.255 port 1 cannot be reached (" in fault.text


class TestCan:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({}, ""),
            ({"operstate": "unknown"}, ""),  # vcan
            ({"flags": 0}, "is down: ip link set can0 up type can"),
            ({"operstate": "down"}, "no carrier"),
            ({"kind": 1}, "no CAN interface"),
        ],
    )
    def test_state(self, machine, given, said):
        add_interface(machine.sys, "can0", **given)
        assert (can_faults("can0", machine.sys) == []) is (said == "")
        assert said in "".join(can_faults("can0", machine.sys))

    def test_a_missing_interface_names_the_present_ones(self, machine):
        add_interface(machine.sys, "can1")
        assert can_faults("can0", machine.sys) == ["is can0, which this node does not have; its CAN interfaces: can1"]


class TestCameras:
    def test_without_the_sdk_usb_is_asked_and_the_message_says_so(self, machine):
        add_camera(machine.sys, 0, "0123")
        add_camera(machine.sys, 1, "9", vendor="046d", name="Webcam")
        (fault,) = faults_of(Turtle2Config(0, camera_serials=["0123", "322142001230"]), machine)
        assert fault.field == "camera_serials"
        assert "names 322142001230, and no such realsense camera is connected; connected: 0123" in fault.text
        assert "pip install pyrealsense2" in fault.text
        assert "serial number on USB is not the one" in fault.text
        assert faults_of(Turtle2Config(0, camera_serials=["0123"]), machine) == []

    def test_a_video_device_is_enough_for_lumos(self, machine):
        add_camera(machine.sys, 1, "L7", vendor="1234")
        add_camera(machine.sys, 2, "0123")
        assert robot_checks.connected("lumos", machine.sys).serials == ("L7",)  # what is a RealSense is none
        assert faults_of(Turtle2Config(0, camera_serials=["L7"], camera_type="lumos"), machine) == []

    def test_a_camera_without_serial_number_is_shown_but_never_meant(self, machine):
        add_camera(machine.sys, 1, "")
        assert [one.serial for one in robot_checks.usb_cameras(machine.sys)] == [""]
        assert robot_checks.connected("realsense", machine.sys).serials == ()

    @pytest.mark.parametrize(
        ("body", "serials", "problem"),
        [
            ("GOOD", ["322142001230"], ""),
            ("raise RuntimeError('no backend')", ["0123"], "pyrealsense2 failed: RuntimeError: no backend"),
        ],
    )
    def test_the_sdk_is_asked_where_it_is_installed(self, machine, tmp_path, body, serials, problem):
        add_camera(machine.sys, 0, "0123")
        good = """
class camera_info: serial_number = "sn"
class _Device:
    def get_info(self, what): return "322142001230"
class context:
    def query_devices(self): return [_Device()]
"""
        (tmp_path / "pyrealsense2.py").write_text(good if body == "GOOD" else body)
        code = (
            "import json, pathlib; from rlinf_actors.hardware.robots.robot_checks import connected;"
            f"found = connected('realsense', pathlib.Path({str(machine.sys)!r}));"
            "print(json.dumps([found.serials, found.problem]))"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        assert json.loads(out) == [serials, problem]


class TestDevices:
    def test_the_grippers_serial_device(self, machine, closed):
        def arm(connection):
            config = FrankaConfig(0, robot_ip="127.0.0.1", gripper_type="robotiq", gripper_connection=connection)
            return [fault.text for fault in faults_of(config, machine)]

        (machine.dev / "ttyUSB0").touch()
        assert arm("/dev/ttyUSB0") == []
        assert "is not there" in arm("/dev/ttyUSB1")[0]
        assert "is not given" in arm(None)[0]


class TestEnumerate:
    def test_all_faults_of_all_robots_in_one_error(self, machine, closed):
        configs = [
            GimArmConfig(3, can_interface="can0", camera_serials=["7"]),
            GimArmConfig(3, can_interface="can1", camera_serials=[]),
            GimArmConfig(4, can_interface="can9"),
        ]
        with pytest.raises(ConfigError) as raised:
            GimArm.on_machine(3, configs, {}, machine)
        text = str(raised.value)
        assert "GimArm on node 3 is not as configured (disable_validate: true skips these checks)" in text
        for part in ("configs[0].can_interface is can0", "configs[0].camera_serials names 7", "configs[1].can_inter"):
            assert part in text
        assert "can9" not in text

    def test_disable_validate_skips_all_checks(self, machine):
        arm = FrankaConfig(0, True, robot_ip="240.0.0.1", camera_serials=["1"], gripper_type="robotiq")
        found = Franka.on_machine(0, [arm], {}, machine)
        assert [info.config.robot_ip for info in found.infos] == ["240.0.0.1"]

    def test_cameras_that_are_not_named_are_those_that_are_connected(self, machine):
        add_camera(machine.sys, 0, "0123")
        add_camera(machine.sys, 1, "0124")
        found = Turtle2.on_machine(0, None, {}, machine)
        assert found.infos[0].config.camera_serials == ["0123", "0124"]

    def test_the_environment_alone(self, machine):
        environ = {"ROBOT_IP": "127.0.0.1,127.0.0.2", "CAMERA_SERIALS": "0123;0124"}
        add_camera(machine.sys, 0, "0123")
        add_camera(machine.sys, 1, "0124")
        found = Franka.on_machine(7, None, environ, machine)
        assert isinstance(found, HardwareResource)
        assert [(info.config.node_rank, info.config.robot_ip, info.model) for info in found.infos] == [
            (7, "127.0.0.1", "Franka"),
            (7, "127.0.0.2", "Franka"),
        ]
        assert Franka.on_machine(7, None, {}, machine) is None
        assert Franka.on_machine(7, [FrankaConfig(8, robot_ip="a")], environ, machine) is None

    @pytest.mark.parametrize(
        ("first", "second", "said"),
        [
            (None, None, r"configs\[1\].camera_serials is not given, nor is configs\[0\].camera_serials"),
            (["7"], ["7"], r"configs\[1\].camera_serials names 7, as does configs\[0\].camera_serials"),
        ],
    )
    def test_two_robots_of_a_node_do_not_share_a_camera(self, machine, first, second, said):
        add_camera(machine.sys, 0, "7")
        configs = [Turtle2Config(0, camera_serials=first), Turtle2Config(0, camera_serials=second)]
        with pytest.raises(ConfigError, match=said):
            Turtle2.on_machine(0, configs, {}, machine)

    def test_the_arms_servers_must_listen(self, machine, listening, closed):
        config = DOSW1Config(0, robot_url="127.0.0.1", left_arm_port=listening, right_arm_port=closed)
        assert [fault.field for fault in faults_of(config, machine)] == ["right_arm_port"]
