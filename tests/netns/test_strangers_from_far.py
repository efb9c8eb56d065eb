"""Strangers of another machine at every socket of two nodes with keys, workers' TCP ports among them, while a job runs.

Only with ``--malformed-connections 1000`` or more: so many come to each; what the job's calls took is printed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns_kit
import pace
import pytest
from keyed_hosts import environment, joined, two_nodes

from rlinf_actors import procfs

LIVE = Path(__file__).resolve().parents[1] / "live"
sys.path.append(str(LIVE))  # the strangers, and what they come to
import strangers  # noqa: E402
from listening import Listening, listening  # noqa: E402

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

MANY = 1000
GROWTH = 20 << 20
"""Bytes that strangers may cost a process, at any moment. One stream at a time: what comes until it is seen and closed
is more where eight share two processors with those who look, and a network that is as fast as memory."""
CALLS = 2000

DRIVER = """
    import json, sys, threading
    from rlinf_actors import Cluster, NodePlacementStrategy
    import attacked_workers, strangers

    with Cluster(num_nodes=2, timeout=30) as cluster:
        group = attacked_workers.Counter.create_group().launch(
            cluster, placement_strategy=NodePlacementStrategy([0, 1]), name="counters")
        group.hit().wait()
        print(json.dumps({"pids": group.pid().wait()}), flush=True)
        made = 1
        for line in sys.stdin:  # measure so many calls, or as many as there are until the next line
            taken = strangers.Latencies()
            next_line = threading.Event()
            if int(line) == 0:
                threading.Thread(target=lambda: (sys.stdin.readline(), next_line.set())).start()
            while not next_line.is_set() and (int(line) == 0 or len(taken) < int(line)):
                taken.of(lambda: group.hit().wait())
            made += len(taken)
            assert group.hit().wait() == [made + 1] * 2, "a call of somebody else's was run"
            made += 1
            print(json.dumps({"calls": len(taken), "p99": taken.p99}), flush=True)
        group.shutdown()
"""


class Talk:
    """A process that is told and asked in lines of JSON."""

    def __init__(self, stack: contextlib.ExitStack, command: list[str], env: dict[str, str]) -> None:
        self._process = stack.enter_context(
            subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        stack.callback(self.end)

    def tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "it has ended"
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    asked: int = request.config.option.malformed_connections
    if asked < MANY:
        pytest.skip(f"needs --malformed-connections {MANY} or more")
    return asked


@pytest.fixture
def network(count: int) -> Iterator[list[netns_kit.Host]]:
    with netns_kit.hosts(3) as made:
        yield made


def test_strangers_of_another_machine(network: list[netns_kit.Host], place: Path, count: int) -> None:
    head, far, elsewhere = network
    address = f"{head.ip}:6399"
    with contextlib.ExitStack() as stack:
        agents = two_nodes(head, far, place, address)
        for agent in agents:
            stack.callback(agent.wait, 30)
            stack.callback(agent.terminate)
        script = place / "driver.py"
        script.write_text(textwrap.dedent(DRIVER))
        env = environment(place, "head", RLINF_HEAD=address)
        job = Talk(stack, head.command([sys.executable, str(script)]), env)
        targets = [*(agent.pid for agent in agents), *job.hear()["pids"]]
        sockets = [one for agent in agents for one in sockets_of(agent.pid)]
        tcp = [one for one in sockets if not one.path]
        assert len(tcp) == 3, tcp  # the head's and the workers'
        outside = environment(place, "nobody")

        def strange(what: str, times: int, where: list[Listening]) -> Talk:
            command = [sys.executable, str(LIVE / "strangers.py"), what, str(times)]
            made = Talk(stack, elsewhere.command(command), outside)
            made.tell([dataclasses.asdict(one) for one in where])
            return made

        strange("knock", 20, sockets).hear()
        job.tell(CALLS)
        quiet = [job.hear()]

        def descriptors() -> dict[int, list[str]]:
            return {pid: strangers.descriptors(pid) for pid in targets}

        fds = pace.settled(descriptors)
        plan = (("knock", count, sockets, GROWTH), ("stream", 20, tcp, GROWTH), ("8 streams", 40, tcp, 4 * GROWTH))
        for what, times, where, most in plan:
            before = peaks_begin(targets)
            job.tell(0)
            came = strange(what, times, where).hear()
            job.tell(0)
            loud = job.hear()
            job.tell(CALLS)
            quiet.append(job.hear())
            grown = {pid: strangers.resident(pid, "VmHWM") - before[pid] for pid in targets}
            print(
                f"\n{what} {times} at {len(where)} sockets: {came}\np99 {loud['p99']:.2f} ms in {loud['calls']} calls, "
                f"{quiet[-2]['p99']:.2f} before and {quiet[-1]['p99']:.2f} after; memory grew by at most "
                f"{[grew >> 10 for grew in grown.values()]} KiB"
            )
            assert "all was taken" not in came
            assert all(grew < most for grew in grown.values()), grown
            assert pace.again_like(descriptors, fds) == fds
        for host, name, rank in ((elsewhere, "near", 2), (far, "away", 3)):
            before = peaks_begin(targets)
            idle = strange("idle", count // 2, tcp)
            idle.hear()
            late = joined(head, host, place, address, name, rank)
            late.terminate()
            late.wait(30)
            grown = {pid: strangers.resident(pid, "VmHWM") - before[pid] for pid in targets}
            print(f"a node joined beside {count // 2} idle connections; {[grew >> 10 for grew in grown.values()]} KiB")
            assert all(grew < GROWTH for grew in grown.values()), grown
            idle.end()


def sockets_of(agent: int) -> list[Listening]:
    """Whatever takes connections on a node, by the pid of its agentd."""
    return listening(procfs.subtree(agent), f"/proc/{agent}/net")


def peaks_begin(pids: list[int]) -> dict[int, int]:
    """What they have now."""
    for pid in pids:
        strangers.begin_peak(pid)
    return {pid: strangers.resident(pid) for pid in pids}
