"""`rlinf-actors run`: start a cluster, run a program on it, and end the cluster with the program.

run.plans decides where the nodes are, run.cluster starts and ends them.
"""

from __future__ import annotations

import os
import shutil
import sys

import click

from rlinf_actors.cli.output import complain
from rlinf_actors.cli.run import plans
from rlinf_actors.cli.run.cluster import RunCluster
from rlinf_actors.cli.run.signals import Signals
from rlinf_actors.errors import UsageError
from rlinf_actors.exit_codes import NOT_EXECUTABLE, NOT_FOUND

TIMEOUT_S = 300.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Nodes on this machine. Default: 1.")
@click.option("--hosts", metavar="HOST,HOST", help="A node on each of these machines, by ssh, in this order of ranks.")
@click.option(
    "--ssh",
    default="ssh",
    metavar="COMMAND",
    show_default=True,
    help="With --hosts: the ssh and its options, such as 'ssh -p 2222'.",
)
@click.option(
    "--python", metavar="PATH", help="With --hosts: Python there, with rlinf-actors. Default: the path of this Python."
)
@click.option("--slurm", is_flag=True, help="A node on each node of the Slurm job in which this command runs.")
@click.option(
    "--address", metavar="ADDRESS", help="Address at which nodes reach this machine. Default: by the routes to them."
)
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
    context: click.Context,
    nodes: int | None,
    hosts: str | None,
    ssh: str,
    python: str | None,
    slurm: bool,
    address: str | None,
    log_dir: str | None,
    timeout: float,
    command: tuple[str, ...],
) -> None:
    """Start a cluster, run PROGRAM on it, and end the cluster with PROGRAM. The exit code is that of PROGRAM, or
    128 + N if signal N ended it.

    In PROGRAM, Cluster() and Cluster.connect() find the cluster and wait for all its nodes. With --nodes, each node has
    all accelerators of this machine.
    """
    if not command:
        raise UsageError("run needs a program: rlinf-actors run --nodes 2 -- python train.py")
    if shutil.which(command[0]) is None:  # as a shell says it
        there = os.path.sep in command[0] and os.path.exists(command[0])
        complain(f"{command[0]} {'is not executable' if there else 'is not found'}")
        context.exit(NOT_EXECUTABLE if there else NOT_FOUND)
    if (nodes is not None) + (hosts is not None) + slurm > 1:
        raise UsageError("--nodes, --hosts and --slurm are three places for nodes: give one of them")
    log_dir = os.path.abspath(log_dir) if log_dir else None
    if slurm:
        plan = plans.in_slurm(address, log_dir)
    elif hosts is None:
        plan = plans.here(nodes or 1, log_dir)
    else:
        plan = plans.by_ssh(list(filter(None, hosts.split(","))), ssh, python or sys.executable, address, log_dir)
    with Signals() as signals, RunCluster(plan, signals, command) as cluster:
        ended = cluster.wait_ready(timeout)
        code = 128 + ended if ended else cluster.run()
    context.exit(code)
