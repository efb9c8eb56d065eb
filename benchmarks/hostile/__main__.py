"""The run itself: start the head and the hostile members, measure the victims, and print a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec

from benchmarks.hostile.victims import Outcome, Victims, serve_head
from benchmarks.processes import cpu_s, die_with_parent, rss_mb, stays_on
from rlinf_actors.exhaustion import raise_file_limit
from rlinf_actors.head.commands import Timing
from rlinf_actors.net.daemon import run_daemon
from rlinf_actors.net.loop import new_event_loop
from rlinf_actors.security.job import job_pair
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire.agent_messages import Welcome
from rlinf_actors.wire.client_messages import GetNodes, Launch
from rlinf_actors.wire.values import WorkerSpec

MEMBERS = 8
LEASE_S = Timing().robot_lease_s
WORKERS = 2
"""So many of the hostile members are workers of one job; the others are drivers."""


@contextlib.contextmanager
def head_process(pair: KeyPair, lease_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a head with these keys in a process of its own; yield the process and its endpoint."""
    command = [sys.executable, "-m", "benchmarks.hostile", "--robot-lease", f"{lease_s:g}", "--serve"]
    with tempfile.TemporaryDirectory(prefix="rlb-") as folder:
        process = subprocess.Popen(
            [*command, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            print(pair.public, pair.secret, file=process.stdin, flush=True)
            yield process, process.stdout.readline().strip()
            process.stdin.close()


@contextlib.contextmanager
def hostile_processes(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of the hostile members on the other processor. They wait for their orders."""
    command = [sys.executable, "-m", "benchmarks.hostile.attacks"]
    with stays_on(0):
        started = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
            )
            for _ in range(count)
        ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def orders(victims: Victims, endpoint: str, head: str, count: int, seconds: float, only: int) -> list[str]:
    """Enroll the hostile members. Return the order of each."""
    made = []
    session = await victims.session(await victims.enroll("driver", "hostile-job"), "hostile-job")
    await session.request(GetNodes(1), 10)
    specs = [WorkerSpec(f"bad-{n}", "g", "hostile-job", n, WORKERS, 0, {}) for n in range(WORKERS)]
    await session.request(Launch("hostile-job", "g", "m:C", specs), 10)
    token = cast(Welcome, session.welcome).token
    for n in range(count):
        if n < count - WORKERS:
            pair = await victims.enroll("driver", f"hostile-{n}")
            of = [pair.public, pair.secret, "driver", f"hostile-{n}", "", ""]
        else:
            pair = job_pair(token)
            of = [pair.public, pair.secret, "worker", "hostile-job", token, f"bad-{n - count + WORKERS}"]
        made.append(json.dumps([endpoint, head, *of, only if only >= 0 else n * 3, seconds]))
    return made


async def run(
    seconds: float, count: int = MEMBERS, only: int = -1, lease_s: float = LEASE_S
) -> tuple[Outcome, float, float]:
    """Return what the victims notice, the head's largest memory in MB, and the head's share of a processor.

    Args:
        seconds: length of the attack.
        count: number of hostile members.
        only: number of the attack with which all begin; -1 for different ones.
        lease_s: length of the robot's lease.
    """
    pair = KeyPair.make()
    with head_process(pair, lease_s) as (head, endpoint), hostile_processes(count) as hostile:
        victims = Victims(endpoint, pair)
        await victims.open()
        given = await orders(victims, endpoint, pair.public, count, seconds + 2, only)
        for process, order in zip(hostile, given, strict=True):
            print(order, file=process.stdin, flush=True)
        watching = asyncio.get_running_loop().create_task(most_memory(head.pid))
        spent = cpu_s(head.pid)
        outcome = await victims.measure(seconds)
        spent = cpu_s(head.pid) - spent
        watching.cancel()
        for process in hostile:
            process.kill()
        outcome = await victims.ended(outcome)
        await victims.close()
        return outcome, _most[-1], spent / seconds


_most: list[float] = []


async def most_memory(pid: int) -> None:
    """Note the largest memory of a process until this task is cancelled."""
    while True:
        _most[:] = [max(rss_mb(pid), *_most)] if _most else [rss_mb(pid)]
        await asyncio.sleep(0.2)


def show(outcome: Outcome, memory_mb: float, cpu: float) -> None:
    """Print the figures of one run."""
    everything = sorted(wait for waits in outcome.waits.values() for wait in waits)
    for name, waits in [*sorted(outcome.waits.items()), ("all", everything)]:
        waits = sorted(waits)
        at = [waits[min(len(waits) - 1, int(len(waits) * share))] * 1e3 for share in (0.5, 0.99)]
        figures = f"p50 {at[0]:8.2f} ms, p99 {at[1]:8.2f} ms, most {waits[-1] * 1e3:8.2f} ms"
        print(f"{name:12} {len(waits):6} round trips: {figures}")
    print(f"failed requests: {len(outcome.failed)} {outcome.failed[:3]}")
    print(f"longest time between renewals of the robot lease: {outcome.renewals:.2f} s; lost: {outcome.lost[:5]}")
    print(f"memory of the head: {memory_mb:.0f} MB at most; processor: {cpu:.0%}")
    for line in outcome.log[:20]:
        print(f"  {line}")


def main(arguments: Sequence[str]) -> None:
    """Print the figures of a run."""
    parser = argparse.ArgumentParser(prog="benchmarks.hostile")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--attack", type=int, default=-1, help="the attack with which all members begin")
    parser.add_argument("--robot-lease", type=float, default=LEASE_S, help="length of the robot's lease in seconds")
    parser.add_argument("--json", action="store_true", help="print what the victims noticed as one line of JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        run_daemon(lambda: serve_head(given.serve, given.robot_lease))
        return
    raise_file_limit()
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    with stays_on(1):
        work = run(given.seconds, given.members, given.attack, given.robot_lease)
        outcome, memory_mb, cpu = loop.run_until_complete(work)
    if given.json:
        print(msgspec.json.encode(outcome).decode())
    else:
        show(outcome, memory_mb, cpu)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
