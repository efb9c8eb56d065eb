"""Run a program with a cluster on the nodes of a Slurm job: a head on this node, and by srun an agentd on each node.

    python with_cluster.py PROGRAM ARGUMENT...      in a batch script; its exit code is the program's
    python with_cluster.py --node ADDRESS KEYS      started by srun on each node

The head listens on an address that other nodes can reach, so the cluster needs keys. The script makes them for this
job, in a directory of mode 0700 in the shared home directory, and removes them at the end. A job of one node uses
loopback and needs no keys.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TOOL = [sys.executable, "-m", "rlinf_actors.cli.main"]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave the blocks below in order
    if sys.argv[1:2] == ["--node"]:
        return be_node(*sys.argv[2:])
    job = os.environ["SLURM_JOB_ID"]
    nodes = hostnames(os.environ["SLURM_JOB_NODELIST"])
    own = address_towards(nodes[1]) if len(nodes) > 1 else "127.0.0.1"
    with contextlib.ExitStack() as stack:
        keys = Path.home() / f".rlinf-actors-job-{job}"
        env = {**os.environ, "RLINF_ACTORS_KEYS": str(keys)}
        stack.callback(shutil.rmtree, keys, ignore_errors=True)
        with_keys = not own.startswith("127.")
        if with_keys:
            tool(["keys", "init"], env)
        state = stack.enter_context(temporary(f"/tmp/rlinf-head-{job}"))
        listen = [*TOOL, "head", "--listen", f"{own}:0", "--state-dir", state]
        head = stack.enter_context(process(listen, env, stdout=subprocess.PIPE))
        assert head.stdout is not None
        address = head.stdout.readline().decode().strip()
        if not address:
            return head.wait()  # the head has printed the reason
        if with_keys:
            for node in nodes:
                file = keys / node / "agent.key"
                file.parent.mkdir(mode=0o700)
                tool(["keys", "enroll", node, "--head", address, "--file", str(file)], env)
        one_each = ["srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--overlap"]
        command = [*one_each, sys.executable, os.path.abspath(__file__), "--node", address, str(keys)]
        stack.enter_context(process(command, dict(os.environ)))
        env |= {"RLINF_HEAD": address, "NUM_NODES": str(len(nodes))}
        with process(sys.argv[1:], env, stdin=None) as program:
            return program.wait()


def be_node(address: str, keys: str) -> int:
    """Run this node's agentd, with its own directory of sockets; workers' output goes to the current directory."""
    name, job = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"]
    own = os.path.join(keys, name)
    env = {**os.environ, "RLINF_ACTORS_KEYS": own if os.path.isdir(own) else keys}
    with temporary(f"/tmp/rlinf-{job}-{os.environ['SLURM_PROCID']}") as place:
        where = [
            "--connect",
            address,
            "--name",
            name,
            "--run-dir",
            place,
            "--log-dir",
            f"{os.getcwd()}/logs-{job}/{name}",
        ]
        with process([sys.executable, "-m", "agentd", *where], env) as agentd:
            return agentd.wait()


def tool(arguments: list[str], env: dict[str, str]) -> None:
    """Run `rlinf-actors` with these arguments. If the command fails, exit with its code; it has printed the reason."""
    with process([*TOOL, *arguments], env, stdout=subprocess.DEVNULL) as running:
        code = running.wait()
    if code:
        sys.exit(code)


def hostnames(nodelist: str) -> list[str]:
    """Return the host names in a list in Slurm's short form, such as gpu[01-04]."""
    done = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=True)
    return done.stdout.split()


def address_towards(host: str) -> str:
    """Return this machine's address on the route to *host*. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def process(
    command: list[str], env: dict[str, str], *, stdin: int | None = subprocess.DEVNULL, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process; at the end of the block, send SIGTERM and wait for its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until `finally` can terminate it
    try:
        with subprocess.Popen(
            command,
            env=env,
            stdin=stdin,
            stdout=stdout,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        ) as started:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                yield started
            finally:
                started.terminate()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def temporary(path: str) -> Iterator[str]:
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
