"""RobotAutoConfig: fields from a node's environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors import DOSW1Config, DualFrankaConfig, FrankaConfig, GimArmConfig, Turtle2Config
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.robots.robot import RobotAutoConfig

serials = st.lists(st.text("0123456789", min_size=3, max_size=12), min_size=1, max_size=4, unique=True)


def robots(kind, **environ):
    return RobotAutoConfig.from_environ(kind, environ).robots(5)


def fill(configs, **environ):
    return RobotAutoConfig.from_environ(type(configs[0]), environ).fill(configs)


@given(st.lists(serials, min_size=1, max_size=4))
def test_each_robot_gets_its_own(lists):
    ips = [f"10.0.0.{n}" for n in range(len(lists))]
    found = robots(FrankaConfig, ROBOT_IP=" , ".join(ips), CAMERA_SERIALS=" ; ".join(map(",".join, lists)))
    assert [(one.node_rank, one.robot_ip, one.camera_serials) for one in found] == [
        (5, ip, cameras) for ip, cameras in zip(ips, lists, strict=True)
    ]


@given(st.dictionaries(st.sampled_from(["ROBOT_IP", "CAMERA_SERIALS", "CAMERA_TYPE", "DISABLE_VALIDATE"]), st.text()))
def test_any_environment_gives_robots_or_a_config_error(environ):
    refused = ""
    found = []
    try:
        found = robots(FrankaConfig, **environ)
    except ConfigError as error:
        refused = error.path
    named = bool(environ.get("ROBOT_IP", "").strip())
    assert bool(refused or found) or not named
    assert all(one.robot_ip for one in found)


def test_an_environment_without_robots_names_none():
    assert robots(FrankaConfig, PATH="/bin", CAMERA_SERIALS="") == []
    assert robots(GimArmConfig) == robots(DOSW1Config) == robots(DualFrankaConfig) == []


def test_a_turtle_is_its_node():
    assert [one.node_rank for one in robots(Turtle2Config)] == [5]
    assert robots(Turtle2Config, CAMERA_SERIALS="1,2")[0].camera_serials == ["1", "2"]


def test_one_value_is_for_all_unless_each_needs_its_own():
    found = robots(GimArmConfig, CAN_INTERFACE="can0,can1", CAMERA_TYPE="zed", ENABLE_GRIPPER="no")
    assert [(one.can_interface, one.camera_type, one.enable_gripper) for one in found] == [
        ("can0", "zed", False),
        ("can1", "zed", False),
    ]


def test_two_arms_of_one_robot():
    found = robots(DualFrankaConfig, LEFT_ROBOT_IP="a,c", RIGHT_ROBOT_IP="b,d", BASE_CAMERA_SERIALS="1;2,3")
    assert [(one.left_robot_ip, one.right_robot_ip, one.base_camera_serials) for one in found] == [
        ("a", "b", ["1"]),
        ("c", "d", ["2", "3"]),
    ]
    with pytest.raises(ConfigError, match="RIGHT_ROBOT_IP: is not set on node 5, but LEFT_ROBOT_IP is"):
        robots(DualFrankaConfig, LEFT_ROBOT_IP="a")


def test_serial_numbers_with_commas_are_one_for_each_robot():
    found = robots(FrankaConfig, ROBOT_IP="a,b", CAMERA_SERIALS="1, 2", DISABLE_VALIDATE="true,true")
    assert [one.camera_serials for one in found] == [["1"], ["2"]]
    (alone,) = robots(FrankaConfig, ROBOT_IP="a", CAMERA_SERIALS="1,2")
    assert alone.camera_serials == ["1", "2"]


def test_a_field_with_a_default_needs_no_value():
    auto = RobotAutoConfig.from_environ(GimArmConfig, {})
    assert [one.can_interface for one in auto.fill([GimArmConfig(node_rank=0)])] == ["can0"]
    assert auto.robots(0) == []
    assert DOSW1Config(node_rank=0).robot_url == "localhost"


def test_the_address_of_an_arm_that_another_node_drives_may_be_left_out():
    (arm,) = RobotAutoConfig.from_environ(FrankaConfig, {}).fill([FrankaConfig(node_rank=0, controller_node_rank=1)])
    assert arm.robot_ip is None
    with pytest.raises(ConfigError, match=r"configs\[0\].robot_ip: is not given"):
        RobotAutoConfig.from_environ(FrankaConfig, {}).fill([FrankaConfig(node_rank=0)])


def test_the_variant_of_an_arm_is_checked():
    assert GimArmConfig(node_rank=0).arm_variant == "gim_arm_xl"
    with pytest.raises(ConfigError, match="arm_variant: is 'huge'; it must be one of gim_arm, gim_arm_xl"):
        GimArmConfig(node_rank=0, arm_variant="huge")


def test_cameras_of_two_arms_have_one_type_unless_a_field_says_another():
    pair = DualFrankaConfig(
        node_rank=0, camera_type="zed", base_camera_type="lumos", left_camera_serials=["1"], base_camera_serials=["2"]
    )
    assert [(cameras.field, cameras.kind) for cameras in pair.cameras()] == [
        ("left_camera_serials", "zed"),
        ("base_camera_serials", "lumos"),
    ]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ROBOT_IP": "a,b", "CAMERA_SERIALS": "1,2,3"}, "CAMERA_SERIALS: has 3 values, and 2 robots.*comma-separated"),
        ({"ROBOT_IP": "a,b", "CAMERA_SERIALS": "1"}, "CAMERA_SERIALS: has 1 value, and 2 robots.*semicolons"),
        ({"ROBOT_IP": "a,b", "CAMERA_SERIALS": "1;2;3"}, "CAMERA_SERIALS: has 3 values"),
        ({"ROBOT_IP": "a,b,c", "CAMERA_TYPE": "zed,zed"}, "CAMERA_TYPE: has 2 values, and 3 robots"),
        ({"ROBOT_IP": "a,b", "GRIPPER_CONNECTION": "/dev/ttyUSB0"}, "GRIPPER_CONNECTION: has 1 value, and 2 robots"),
        ({"ROBOT_IP": "a,,b"}, "ROBOT_IP: has an empty value"),
        ({"ROBOT_IP": "a", "CAMERA_SERIALS": "1;"}, "CAMERA_SERIALS: has a robot without any"),
        ({"ROBOT_IP": "a", "DISABLE_VALIDATE": "perhaps"}, "DISABLE_VALIDATE: is 'perhaps'"),
        ({"ROBOT_IP": "a", "CONTROLLER_NODE_RANK": "two"}, "CONTROLLER_NODE_RANK"),
        ({"ROBOT_IP": "10.0.0.999"}, "robot_ip.*IP address"),
    ],
)
def test_contradicting_variables_are_refused(environ, said):
    with pytest.raises(ConfigError, match=said):
        robots(FrankaConfig, **environ)


def test_the_configuration_goes_before_the_environment_even_where_it_says_the_default():
    arm = FrankaConfig(5, robot_ip="mine", camera_type="realsense")
    filled = fill([arm], ROBOT_IP="theirs", CAMERA_TYPE="zed", GRIPPER_TYPE="robotiq", CAMERA_SERIALS="7")[0]
    assert (filled.robot_ip, filled.camera_type, filled.gripper_type) == ("mine", "realsense", "robotiq")
    assert filled.camera_serials == ["7"]
    assert arm.gripper_type == "franka"  # what was passed in is not changed


def test_values_go_by_number_or_to_those_that_lack_them():
    def pair():
        return [FrankaConfig(5, robot_ip="mine"), FrankaConfig(5)]

    assert [one.robot_ip for one in fill(pair(), ROBOT_IP="x,y")] == ["mine", "y"]
    assert [one.robot_ip for one in fill(pair(), ROBOT_IP="x")] == ["mine", "x"]
    with pytest.raises(ConfigError, match="ROBOT_IP: has 3 values, and 1 robot of the node"):
        fill(pair(), ROBOT_IP="x,y,z")
    with pytest.raises(ConfigError, match=r"configs\[1\].robot_ip: is not given.*set ROBOT_IP.*node 5"):
        fill(pair())
