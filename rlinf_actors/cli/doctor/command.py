"""`rlinf-actors doctor`: check this machine and the nodes of a cluster, and print each problem with its fix.

doctor.machine collects the facts about this machine, and doctor.cluster those about the nodes. The checks turn facts
into findings; they are pure, and are rows of tables.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from rlinf_actors.cli.doctor.bundle import check_new, write_bundle
from rlinf_actors.cli.doctor.cluster import ClusterFacts, ask_cluster
from rlinf_actors.cli.doctor.cluster_checks import diagnose_cluster, speed, table
from rlinf_actors.cli.doctor.finding import FAIL, PASS, WARN, Finding
from rlinf_actors.cli.doctor.machine import inspect_machine
from rlinf_actors.cli.doctor.machine_checks import MachineFacts, diagnose
from rlinf_actors.cli.output import echo, folded, json_option, note, show_json, show_table
from rlinf_actors.errors import ConfigError, RlinfActorsError
from rlinf_actors.net.discovery import with_client_file
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.progress import Facts, showing_blocked
from rlinf_actors.settings import Settings, takes_sequences
from rlinf_actors.wire.check_values import NodeFacts

_COLORS = {PASS: "green", WARN: "yellow", FAIL: "red"}


@click.command()
@click.option(
    "--head",
    metavar="HOST:PORT",
    help="Ask this head and its nodes too. Default: RLINF_HEAD, else the head in the client file, else the only one "
    "here.",
)
@click.option("--paths/--no-paths", default=True, help="Test the network between the nodes, by short transfers.")
@click.option(
    "--bundle",
    metavar="FILE.tar.gz",
    help="Also write an archive for a bug report: what doctor found, the state of the cluster, events, logs of "
    "agentds, versions and configuration, without keys, tokens, environments and output of workers.",
)
@json_option
@click.pass_context
def doctor(context: click.Context, head: str | None, paths: bool, bundle: str | None, as_json: bool) -> None:
    """Check this machine, and the nodes of its cluster: packages, limits, network, clocks, disks, GPUs, keys.

    Changes nothing. Needs no cluster. The network between nodes is tested by transfers of at most 64 MiB and 0.3 s in
    each direction. Exit code 1 if a check fails; warnings do not count.
    """
    note("checking this machine ...")
    if bundle is not None:
        check_new(Path(bundle))  # before the work
    findings, machine, settings, cluster = examine(head, paths)
    if as_json:
        show_json(report(findings, machine.facts, cluster))
    else:
        _show(findings)
        _show_versions(cluster)
    if bundle is not None:
        diagnosis = report(findings, machine.facts, cluster)
        missing = write_bundle(Path(bundle), diagnosis, settings, machine.endpoint, machine.status, cluster)
        note(f"wrote {bundle}; look at it before you send it" + (f" ({len(missing)} missing)" if missing else ""))
    if any(finding.status == FAIL for finding in findings):
        context.exit(1)


def examine(head: str | None, paths: bool) -> tuple[list[Finding], MachineFacts, Settings, ClusterFacts]:
    """Return what the checks found, facts about this machine, the settings, and what the nodes have said.

    *head* is the value of --head. Blocks.
    """
    settings, findings = Settings.load(), []
    try:
        settings = with_client_file(settings)
    except ConfigError as error:
        findings.append(Finding("client_file", FAIL, str(error), "correct it: scripts and commands fail until then"))
    with showing_blocked(lambda: Facts("checking this machine: libraries of its accelerators, and its head")):
        machine, cluster = inspect_machine(settings, head), ClusterFacts()
    findings += diagnose(machine)
    if machine.status is not None:
        note(f"asking {counted(machine.num_nodes, 'node')} ...")
        try:
            cluster = ask_cluster(machine.endpoint, settings, machine.status, paths)
            cluster = dataclasses.replace(cluster, here=machine.facts)
            findings += diagnose_cluster(cluster)
        except RlinfActorsError as error:
            findings.append(Finding("nodes", FAIL, f"the head does not answer any more: {error}", "try again"))
    return findings, machine, settings, cluster


def report(findings: list[Finding], facts: NodeFacts, cluster: ClusterFacts) -> dict[str, Any]:
    """Return the JSON object of --json (docs/reference/json.md). *facts* are those of this machine."""
    counts = {status: sum(finding.status == status for finding in findings) for status in _COLORS}
    return {
        "findings": [dataclasses.asdict(finding) for finding in findings],
        **counts,
        "machine": _json(facts),
        "nodes": [
            {
                "node": cluster.name(id),
                "node_id": id,
                "clock_offset_s": clock.offset_s if (clock := cluster.clocks.get(id)) is not None else None,
                "clock_error_s": clock.error_s if clock is not None else None,
                **_json(facts),
            }
            for id, facts in cluster.facts.items()
        ],
        "paths": [
            {
                "near": _json(path.near),
                "far": _json(path.far),
                "there_bit_s": speed(path.answer.there),
                "back_bit_s": speed(path.answer.back),
                "rtt_s": path.answer.rtt_s,
                "there": path.there,
                "back": path.back,
                "fault": path.answer.fault,
            }
            for path in cluster.paths
        ],
        "untested": cluster.untested,
    }


def _json(value: Any) -> Any:
    """Return a value of a message, or a dataclass, with all its fields: keys of JSON are never left out."""
    if isinstance(value, msgspec.Struct):
        return {name: _json(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_json(one) for one in value] if isinstance(value, (list, tuple)) else value


def _show(findings: list[Finding]) -> None:
    colored = takes_sequences(sys.stdout)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        word = click.style(finding.status.upper(), fg=_COLORS[finding.status], bold=finding.status != PASS)
        line = folded(f"{finding.status}  {finding.check.ljust(width)}  {finding.text}", width + 8)
        echo(line[len(finding.status) :], lead=word, color=colored)
        if finding.fix and finding.status in (WARN, FAIL):
            echo(folded(f"{' ' * (width + 8)}fix: {finding.fix}", width + 13))


def _show_versions(cluster: ClusterFacts) -> None:
    """Print which versions of which packages the nodes have."""
    rows = [
        (package, version or "none", ", ".join(places))
        for package, versions in sorted(table(cluster).items())
        for version, places in sorted(versions.items())
    ]
    if len(cluster.facts) > 1:
        echo()
        show_table(("PACKAGE", "VERSION", "NODES"), rows, "")
