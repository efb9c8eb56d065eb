"""The commands `rlinf-actors job list|show|stop`. A job is the drivers with one namespace, and their groups.

`job_dict` returns what --json prints: its keys are stable; new keys may be added.
"""

from __future__ import annotations

import time
from typing import Any

import click

from rlinf_actors.cli import complete
from rlinf_actors.cli.output import (
    confirm,
    echo,
    json_option,
    note,
    plain,
    show_fields,
    show_json,
    show_table,
    yes_option,
)
from rlinf_actors.cli.queries import head_option, status_of
from rlinf_actors.cli.views import (
    driver_dict,
    end_group,
    grace_option,
    group_dict,
    group_text,
    reason_option,
)
from rlinf_actors.cli.worker_counts import counts_dict, counts_text
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.model.readable import duration
from rlinf_actors.plurals import counted
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.program import placed


@click.group()
def job() -> None:
    """List the jobs, show one, or end its groups. A job is the drivers with one namespace, and their groups."""


@job.command("list")
@head_option
@json_option
def list_jobs(head: str | None, as_json: bool) -> None:
    """List the jobs: who runs what, since when, and how many workers."""
    _, status = status_of(head)
    jobs = jobs_of(status)
    if as_json:
        show_json(jobs)
        return
    show_table(
        ("JOB", "DRIVER", "HOST", "PID", "FOR", "GROUPS", "WORKERS"),
        [_row(job, status.at) for job in jobs],
        "no driver is connected, and no group is running",
    )


@job.command()
@click.argument("name", shell_complete=complete.jobs)
@head_option
@json_option
def show(name: str, head: str | None, as_json: bool) -> None:
    """Show a job: its drivers, its groups, and the robots that they hold."""
    _, status = status_of(head)
    found = find_job(jobs_of(status), name)
    if as_json:
        show_json(found)
        return
    show_fields(
        {
            "job": name,
            "drivers": [_driver_line(driver, status.at) for driver in found["drivers"]] or "none is connected",
            "groups": [_group_line(group) for group in found["groups"]] or "none",
            "robots": [f"{one['title']}: group {one['group']}, {duration(one['held_s'])}" for one in found["leases"]]
            or "none",
        }
    )


@job.command()
@click.argument("name", shell_complete=complete.jobs)
@grace_option
@reason_option
@yes_option
@head_option
@json_option
def stop(name: str, grace_s: float, reason: str, yes: bool, head: str | None, as_json: bool) -> None:
    """End all groups of a job, and wait until their workers have ended. Its drivers go on."""
    endpoint, status = status_of(head)
    found = find_job(jobs_of(status), name)
    groups = [group for group in status.groups if group.namespace == name]
    for group in groups:
        note(group_text(status, group))
    if groups:
        what = counted(len(groups), "group")
        confirm(yes, f"ends {what} of job {name} (above)", f"End {what} of job {name}?", can_ask=not as_json)
    failed: dict[str, str] = {}
    for group in groups:
        try:
            end_group(endpoint, group, grace_s, reason)
        except RlinfActorsError as error:
            failed[group.name] = str(error)
            echo(f"group {plain(group.name)} of job {plain(name)} has not ended: {plain(str(error))}", err=True)
    for driver in found["drivers"]:
        note(f"its driver goes on, and may launch again: {_driver_line(driver, status.at)}")
    if as_json:
        show_json(stopped_dict(found, failed))
    if failed:
        raise RlinfActorsError(f"{len(failed)} of {counted(len(groups), 'group')} of job {name!r} did not end (above)")
    if not groups:
        note(f"job {name} has no group")


def stopped_dict(job: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    """Return the JSON object of `job stop`: the job as it was, and why groups have not ended, by name."""
    return {"job": job, "failed": failed}


def jobs_of(status: Status) -> list[dict[str, Any]]:
    """Return the JSON objects of all jobs with a connected driver or a group, by name."""
    names = {one.namespace for one in status.drivers} | {group.namespace for group in status.groups}
    return [job_dict(name, status) for name in sorted(names)]


def job_dict(name: str, status: Status) -> dict[str, Any]:
    groups = [group for group in status.groups if group.namespace == name]
    return {
        "name": name,
        "drivers": [driver_dict(driver) for driver in status.drivers if driver.namespace == name],
        "groups": [group_dict(group) for group in groups],
        **counts_dict(worker for group in groups for worker in group.workers),
        "leases": [
            {"title": lease.title, "group": lease.group, "state": lease.state, "held_s": round(lease.held_s, 3)}
            for lease in status.leases
            if lease.namespace == name
        ],
    }


def find_job(jobs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = next((job for job in jobs if job["name"] == name), None)
    if found is None:
        known = ", ".join(job["name"] for job in jobs) or "none at all"
        left = f"what it left, if it has ended: `rlinf-actors events --job {name}`, `rlinf-actors logs --job {name}`"
        raise UsageError(f"there is no job {name!r}; there are: {known}; {left}")
    return found


def _row(job: dict[str, Any], at: float) -> tuple[Any, ...]:
    drivers = job["drivers"]
    first = drivers[0] if drivers else None
    workers = counts_text(job) if job["workers"] else "-"
    if first is None:
        return job["name"], "none (detached)", "-", "-", "-", len(job["groups"]), workers
    more = f" and {len(drivers) - 1} more" if len(drivers) > 1 else ""
    return (
        job["name"],
        (first["text"] or "a driver") + more,
        first["hostname"] or "-",
        first["pid"],
        _age(first, at),
        len(job["groups"]),
        workers,
    )


def _driver_line(driver: dict[str, Any], at: float) -> str:
    key = f", key {driver['key']}" if driver["key"] else ""
    script = f": {driver['script']}" if "/" in driver["script"] else ""
    who = placed(driver["text"] or "a driver", driver["pid"], driver["hostname"], driver["started"] or 0.0, at)
    return f"{who}{key}{script}"


def _group_line(group: dict[str, Any]) -> str:
    return f"{group['name']}: {group['class']}, {group['state']}, {counts_text(group)}"


def _age(driver: dict[str, Any], at: float) -> str:
    return "-" if driver["started"] is None else duration((at or time.time()) - driver["started"])
