"""`rlinf-actors hw scan`: show the hardware of this machine. Needs no cluster and changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from rlinf_actors.cli.output import echo, json_option, note, show_fields, show_json, show_table, size
from rlinf_actors.errors import UsageError
from rlinf_actors.hardware.child_process import fault_of, run_child
from rlinf_actors.hardware.probe import run_probe
from rlinf_actors.hardware.probe_report import ProbeReport
from rlinf_actors.hardware.robots.robot_checks import CAMERAS
from rlinf_actors.hardware.robots.scan import RobotScan
from rlinf_actors.runtime.progress import Facts, showing_blocked
from rlinf_actors.wire.values import HardwareReport

ROBOTS_TIMEOUT_S = 15.0
"""Seconds that camera SDKs, and the robots that environment variables name, may take to answer."""


@click.group()
def hw() -> None:
    """Show the hardware of this machine."""


@hw.command()
@click.option("--robots", is_flag=True, help="Also show cameras, CAN interfaces, serial devices and robots.")
@click.option("--toml", "as_toml", is_flag=True, help="Print tables to paste into agentd.toml.")
@json_option
def scan(robots: bool, as_toml: bool, as_json: bool) -> None:
    """Show this machine's accelerators, CPUs, memory and network; with --robots also what robots need.

    --robots tries each robot that environment variables name (ROBOT_IP, CAN_INTERFACE, ROBOT_URL, ...).
    """
    if as_json and as_toml:
        raise UsageError("--json and --toml are two forms of the same: give one")
    note("probing this machine's hardware ...")
    with showing_blocked(lambda: Facts("asking the libraries of accelerators")):
        report = asyncio.run(run_probe())
    with showing_blocked(lambda: Facts("searching for robots and cameras")):
        found = asyncio.run(scan_robots(ROBOTS_TIMEOUT_S)) if robots else None
    if as_json:
        show_json(scan_dict(report, found))
    elif as_toml:
        echo(toml_of(report, found), nl=False)
    else:
        _show(report, found)


async def scan_robots(timeout_s: float) -> RobotScan:
    """Search for robots and cameras in a child process, and return what was found. If the process fails or takes longer
    than *timeout_s*, the result has no devices, only a text in `faults` that says so.
    """
    end = await run_child("rlinf_actors.hardware.robots.scan", [], env=os.environ, timeout_s=timeout_s)
    fault = fault_of(end, "the scan for robots", timeout_s)
    if fault:
        return RobotScan(faults=[fault])
    try:
        return msgspec.json.decode(end.output, type=RobotScan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # an SDK may have ended or written there
        return RobotScan(faults=[f"the scan for robots left no readable report ({error}): {end.output[:80]!r}"])


def scan_dict(report: ProbeReport, robots: RobotScan | None) -> dict[str, Any]:
    """Return the JSON object that `hw scan --json` prints. Its keys are stable; new keys may be added. ``robots`` is
    null without --robots.
    """
    return {
        "hostname": report.hostname,
        "num_cpus": report.num_cpus,
        "memory_bytes": report.memory_bytes,
        "python": report.python,
        "interpreter": report.interpreter,
        "interfaces": report.interfaces,
        "accelerators": [_flat(info) for resource in report.resources for info in resource.infos],
        "faults": report.faults,
        "robots": None if robots is None else msgspec.to_builtins(robots),
    }


def toml_of(report: ProbeReport, robots: RobotScan | None) -> str:
    """Return what `hw scan --toml` prints: tables for agentd.toml, with labels of this node and environment variables
    for its robots.
    """
    labels = {"host": report.hostname}
    for resource in report.resources:
        models = sorted({info.model for info in resource.infos})
        labels[resource.type] = f"{len(resource.infos)} x {', '.join(models)}"
    lines = ["[node.labels]", *_toml_pairs(labels)]
    if robots is not None:
        env = {**_suggested_variables(robots), **robots.variables}
        lines += ["", "# Robots of this node; a node group with `hardware: {type: ...}` takes what it lacks from here."]
        lines += ["[node.env]", *_toml_pairs(env)]
        lines += [
            f"# {camera.kind or 'camera'} {camera.serial or 'without serial number'}" for camera in robots.cameras
        ]
    return "\n".join(lines) + "\n"


def _suggested_variables(robots: RobotScan) -> dict[str, str]:
    """Return the environment variables CAMERA_TYPE, CAMERA_SERIALS and CAN_INTERFACE for this node's robots, with the
    cameras and CAN interfaces that were found. The variables of cameras are left out if several kinds were found.
    """
    found: dict[str, str] = {}
    named = [one for one in robots.cameras if one.kind and one.serial]
    usable = [one for one in named if one.source == "sdk" or not CAMERAS[one.kind].usb_differs]
    if usable and len({one.kind for one in named}) == 1:
        found["CAMERA_TYPE"] = usable[0].kind
        found["CAMERA_SERIALS"] = ",".join(one.serial for one in usable)
    if up := [name for name, fault in robots.can.items() if not fault]:
        found["CAN_INTERFACE"] = ",".join(up)
    return found


def _toml_pairs(values: dict[str, str]) -> list[str]:
    # a JSON string is a TOML basic string, but for the escapes of DEL and of characters beyond 16 bits
    return [
        f"{name if name.replace('_', '').isalnum() else json.dumps(name)} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in values.items()
    ]


def _flat(info: HardwareReport) -> dict[str, Any]:
    return {"type": info.type, "model": info.model, **info.detail}


def _show(report: ProbeReport, robots: RobotScan | None) -> None:
    show_fields(
        {
            "host": report.hostname,
            "cpus": report.num_cpus,
            "memory": size(report.memory_bytes),
            "python": f"{report.python}  {report.interpreter}",
            "network": ", ".join(f"{name} {ip}" for name, ip in report.interfaces.items()) or "-",
        }
    )
    echo()
    accelerators = [_flat(info) for resource in report.resources for info in resource.infos]
    show_table(
        ("TYPE", "INDEX", "MODEL", "MEMORY", "NUMA", "BUS", "BUSY", "TEMP", "UUID"),
        [
            (
                one["type"],
                one.get("index", "-"),
                one["model"],
                size(int(one.get("memory_bytes", 0))),
                _or_dash(one.get("numa_node", -1)),
                one.get("pci_bus") or "-",
                _or_dash(one.get("utilization", -1), " %"),
                _or_dash(one.get("temperature", -1), " C"),
                one.get("uuid") or "-",
            )
            for one in accelerators
        ],
        "no accelerator was found",
    )
    if robots is not None:
        _show_robots(robots)
    faults = [*report.faults, *(robots.faults if robots else ())]
    for fault in faults:
        note(f"fault: {fault}")


def _show_robots(robots: RobotScan) -> None:
    _section(
        ("CAMERA", "SERIAL", "NAME", "VIDEO", "SOURCE"),
        [(c.kind or "-", c.serial or "-", c.name or "-", ",".join(c.video) or "-", c.source) for c in robots.cameras],
        "no camera was found",
    )
    _section(("CAN", "STATE"), [(name, fault or "up") for name, fault in robots.can.items()], "no CAN interface")
    _section(("SERIAL DEVICE", "IS"), list(robots.serial.items()), "no serial device with a name of its own")
    _section(
        ("ROBOT", "VALUES", "STATE", "IDENTITY"),
        [
            (r.type, " ".join(f"{k}={v}" for k, v in r.values.items()), state, ", ".join(r.identity))
            for r in robots.robots
            for state in ["; ".join(r.faults) or "answers"]
        ],
        "the environment names no robot (ROBOT_IP, CAN_INTERFACE, ROBOT_URL, LEFT_ROBOT_IP and RIGHT_ROBOT_IP)",
    )


def _section(headings: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    if rows:
        echo()
    show_table(headings, rows, empty)


def _or_dash(value: Any, unit: str = "") -> str:
    return "-" if value in (-1, None) else f"{value}{unit}"
