"""`rlinf-actors doctor`: whether this machine is fit, and the exact fix where it is not."""

from __future__ import annotations

import dataclasses
import os
import sys

import click

from rlinf_actors.cli.doctor_checks import FAIL, WARN, Finding, diagnose
from rlinf_actors.cli.doctor_machine import look
from rlinf_actors.cli.output import json_option, note, plain, show_json
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.discovery import with_client_file
from rlinf_actors.settings import Settings

_COLORS = {"pass": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option(
    "--head", metavar="HOST:PORT", help="Ask this head too. Default: RLINF_HEAD, else the client file's, else none."
)
@json_option
@click.pass_context
def doctor(context: click.Context, head: str | None, as_json: bool) -> None:
    """Check this machine: interpreter, sockets, shared memory, limits, cgroups, head, accelerators, leftovers.

    Changes nothing. Exit code 1 if something fails; warnings do not count.
    """
    note("looking at this machine ...")
    settings, findings = Settings.load(), []
    try:
        settings = with_client_file(settings)
    except ConfigError as error:
        findings.append(
            Finding("client_file", FAIL, str(error), "correct it: scripts and commands fail as long as it is so")
        )
    findings += diagnose(look(settings, head))
    if as_json:
        show_json({"findings": [dataclasses.asdict(finding) for finding in findings], **counts(findings)})
    else:
        _show(findings)
    if any(finding.status == FAIL for finding in findings):
        context.exit(1)


def counts(findings: list[Finding]) -> dict[str, int]:
    """How many of each status."""
    return {status: sum(finding.status == status for finding in findings) for status in _COLORS}


def _show(findings: list[Finding]) -> None:
    colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        word = click.style(finding.status.upper(), fg=_COLORS[finding.status], bold=finding.status != "pass")
        click.echo(f"{word}  {finding.check.ljust(width)}  {plain(finding.text)}", color=colored)
        if finding.fix and finding.status in (WARN, FAIL):
            click.echo(f"{' ' * (width + 8)}fix: {finding.fix}")
