"""The example lerobot_arm, with LeRobot's own interface of robots: it reaches its target, and holds still last."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pace
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "lerobot_arm"
LEROBOT = ROOT / ".lerobot"

pytestmark = [
    pytest.mark.live,
    pytest.mark.torch,  # which lerobot imports
    pytest.mark.skipif(
        not LEROBOT.exists() and importlib.util.find_spec("lerobot") is None,
        reason="needs lerobot: .ci/lerobot-requirements.txt says how to install it",
    ),
]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RLINF_HEAD")}
    home = str(tmp_path / "huggingface")  # for calibration
    return {**clean, "PYTHONPATH": f"{LEROBOT}:{FOLDER}", "HF_HOME": home}


@pytest.fixture
def servos(tmp_path: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Simulated servos: their port, and what returns the commands that they took."""
    record = tmp_path / "servos.jsonl"
    command = [sys.executable, str(FOLDER / "servos.py"), str(record)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        port = running.stdout.readline().strip()
        yield port, lambda: [json.loads(line)["command"] for line in record.read_text().splitlines()]
        running.communicate()


INTERFACE = """
import sys
from lerobot.robots import Robot, RobotConfig
from simulated_so101 import SimulatedSO101
config = RobotConfig.get_choice_class("simulated_so101_follower")(id="left", port=input())
robot = SimulatedSO101(config)
assert isinstance(robot, Robot) and not robot.is_connected
for use in (robot.get_observation, robot.disconnect):
    try:
        use()
        raise AssertionError(use)
    except ConnectionError:
        pass
robot.connect()
assert robot.is_connected and robot.is_calibrated
seen = robot.get_observation()
assert seen.keys() == robot.observation_features.keys()
assert seen["front"].shape == robot.observation_features["front"]
goal = {key: 30.0 for key in robot.action_features}
assert robot.send_action(goal) == goal
while robot.get_observation()["wrist_roll.pos"] < 10:
    pass
robot.hold()
held = robot.get_observation()
assert {held[key] for key in goal} == {robot.get_observation()[key] for key in goal}
robot.disconnect()
"""


def test_the_arm_is_a_lerobot_robot(env, servos):
    port, commands = servos
    done = subprocess.run(
        [sys.executable, "-c", INTERFACE], env=env, input=port, capture_output=True, text=True, check=False,
        timeout=pace.PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert commands() == ["goal", "hold"]


def test_the_arm_holds_still_while_its_policy_hangs_and_then_reaches_the_target(env, servos):
    port, commands = servos
    command = [sys.executable, str(FOLDER / "main.py"), "--steps", "90", "--port", port]
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert pace.again_like(lambda: commands()[-1:], ["goal"]) == ["goal"]
            started = psutil.Process(driver.pid).children(recursive=True)
            (policy,) = [one for one in started if one.cmdline() and "policy:0" in one.cmdline()[0]]
            policy.suspend()
            assert pace.again_like(lambda: commands()[-1:], ["hold"]) == ["hold"]
            policy.resume()
            out, _ = driver.communicate(timeout=pace.PATIENCE_S)
        finally:
            driver.kill()
    assert driver.returncode == 0
    assert re.search(r"^90 frames, [1-9]\d* without an action in time$", out, re.M)
    assert re.search(r"^the target was 22 pixels away, and is [012] pixels away$", out, re.M)
    assert commands()[-1] == "hold"


@pytest.mark.nightly("tests/robots shows the same of a simulated arm, without LeRobot")
def test_the_arm_holds_still_when_its_driver_is_killed(env, servos, rlinf_leak_check):
    port, commands = servos
    command = [sys.executable, str(FOLDER / "main.py"), "--steps", "1000000", "--port", port]
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as driver:
        assert pace.again_like(lambda: commands()[-1:], ["goal"]) == ["goal"]
        driver.send_signal(signal.SIGKILL)
    assert pace.again_like(lambda: commands()[-1:], ["hold"]) == ["hold"]
