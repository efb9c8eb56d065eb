"""`rlinf-actors run`: start a cluster, run a program on it, and end the cluster with the program.

This module says where the nodes are (a Plan); run_cluster starts and ends them.
"""

from __future__ import annotations

import os
import shutil
import sys

import click

from rlinf_actors.cli.output import complain
from rlinf_actors.cli.run_cluster import Plan, RunCluster, Start
from rlinf_actors.cli.run_signals import Signals
from rlinf_actors.cluster.local_daemon import AGENTD, boot
from rlinf_actors.errors import UsageError
from rlinf_actors.exit_codes import NOT_EXECUTABLE, NOT_FOUND

TIMEOUT_S = 300.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Nodes on this machine. Default: 1.")
@click.option(
    "--log-dir",
    metavar="DIR",
    help="Keep the output of workers in DIR/NODE on each node. Default: only after a failure.",
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=TIMEOUT_S, metavar="SECONDS",
    show_default=True, help="Time that the nodes may take to come up.",
)  # fmt: skip
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGUMENT]...")
@click.pass_context
def run(
    context: click.Context, nodes: int | None, log_dir: str | None, timeout: float, command: tuple[str, ...]
) -> None:
    """Start a cluster, run PROGRAM on it, and end the cluster with PROGRAM. The exit code is that of PROGRAM, or
    128 + N if signal N ended it.

    In PROGRAM, Cluster() and Cluster.connect() find the cluster and wait for all its nodes. Each node on this machine
    has all of the machine's accelerators.
    """
    if not command:
        raise UsageError("run needs a program: rlinf-actors run --nodes 2 -- python train.py")
    if shutil.which(command[0]) is None:  # as a shell says it
        there = os.path.sep in command[0] and os.path.exists(command[0])
        complain(f"{command[0]} {'is not executable' if there else 'is not found'}")
        context.exit(NOT_EXECUTABLE if there else NOT_FOUND)
    with Signals() as signals, RunCluster(_here(nodes or 1, log_dir), signals) as cluster:
        ended = cluster.wait_ready(timeout)
        code = 128 + ended if ended else cluster.run(command)
    context.exit(code)


def _here(nodes: int, log_dir: str | None) -> Plan:
    names = [f"node{rank}" for rank in range(nodes)]
    command = [sys.executable, *boot(AGENTD), "--of-run"]
    return Plan(names, "127.0.0.1", "127.0.0.1", [Start("agentd", command, [name]) for name in names], True, log_dir)
