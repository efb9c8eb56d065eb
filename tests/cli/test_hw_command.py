"""`rlinf-actors hw scan` on this machine, with its real hardware and with invented hardware."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_actors.cli import hw_command
from rlinf_actors.compat import tomllib
from rlinf_actors.hardware.probe_report import ProbeReport
from rlinf_actors.hardware.robots.scan import FoundCamera, RobotScan
from rlinf_actors.wire.values import HardwareReport, ResourceReport

pytestmark = pytest.mark.slow

REPORT = ProbeReport(
    'lab "3"', 8, 2**36, "3.11.7", "/usr/bin/python3",
    resources=[ResourceReport("NV_GPU", [HardwareReport("NV_GPU", "H200", {"index": i}) for i in range(2)])],
)  # fmt: skip


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlinf_actors.cli.main", "hw", "scan", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=60,
    )  # fmt: skip


def test_json_has_hardware_and_robots():
    run = command("--robots", "--json", ROBOT_IP="127.0.0.1", CAN_INTERFACE="can77")
    found = json.loads(run.stdout)
    assert run.returncode == 0
    assert found["num_cpus"] == len(os.sched_getaffinity(0))
    assert {"hostname", "accelerators", "interfaces", "faults", "memory_bytes"} < set(found)
    robots = {one["type"]: one for one in found["robots"]["robots"]}
    franka = {
        "type": "Franka",
        "values": {"robot_ip": "127.0.0.1"},
        "faults": [],
        "identity": ["localhost of this node"],
    }
    assert robots["Franka"] == franka
    assert "can77, which this node does not have" in robots["GimArm"]["faults"][0]
    assert robots["GimArm"]["identity"] == ["can77 of this node"]
    assert json.loads(command("--json").stdout)["robots"] is None


def test_default_output_is_a_table():
    run = command("--robots", ROBOT_IP="127.0.0.1")
    assert run.returncode == 0
    assert "Franka  robot_ip=127.0.0.1  answers  localhost of this node" in run.stdout
    assert "no accelerator was found" in run.stderr or "TYPE" in run.stdout


def test_two_forms_at_once_are_refused():
    run = command("--json", "--toml")
    assert (run.returncode, run.stdout) == (64, "")


def test_toml_is_accepted_by_agentd(tmp_path: Path):
    robots = RobotScan(
        cameras=[
            FoundCamera("12", "realsense", source="sdk"),
            FoundCamera("13", "realsense", source="sdk"),
            FoundCamera("x", "", "Webcam"),
        ],
        can={"can0": "", "can1": "is down"},
        variables={"ROBOT_IP": "10.0.0.1"},
    )
    text = hw_command.toml_of(REPORT, robots)
    assert tomllib.loads(text) == {
        "node": {
            "labels": {"host": 'lab "3"', "NV_GPU": "2 x H200"},
            "env": {
                "CAMERA_TYPE": "realsense", "CAMERA_SERIALS": "12,13", "CAN_INTERFACE": "can0", "ROBOT_IP": "10.0.0.1",
            },
        }
    }  # fmt: skip
    file = tmp_path / "agentd.toml"
    file.write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "agentd", "--config", str(file), "--check-config"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")


def test_serial_numbers_unknown_to_the_sdk_are_not_suggested():
    robots = RobotScan(cameras=[FoundCamera("0123", "realsense")])
    assert "CAMERA_SERIALS" not in tomllib.loads(hw_command.toml_of(REPORT, robots))["node"]["env"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os; os.abort()", "crashed its process (SIGABRT)"),
        ("import time; time.sleep(600)", "no answer within 1 s"),
        ("raise SystemExit(3)", "with exit code 3"),
        ("import os; os._exit(0)", "left no readable report"),
    ],
)
async def test_failing_sdk_loses_the_robot_scan_only(tmp_path, monkeypatch, body, said):
    package = tmp_path / "pyrealsense2.py"
    package.write_text(f"{body}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (fault,) = (await hw_command.scan_robots(1.0 if "sleep" in body else 60.0)).faults
    assert said in fault
