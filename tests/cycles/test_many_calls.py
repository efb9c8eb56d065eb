"""Many calls leave caller, workers, template and agentd as they were. `--calls 10000000` is the long form."""

from __future__ import annotations

import os

import pace
import pytest
from cycle_kit import check, held, template_of
from nightly import Figures

from rlinf_actors import Cluster, NodePlacementStrategy, Worker
from rlinf_actors.worker.context import current

pytestmark = pytest.mark.live

UNDER_WAY = 500
"""Calls at a time."""
WARM_UP = 20 * UNDER_WAY


class Callee(Worker):
    """Answers, at once or not at all."""

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: object) -> object:
        return value

    def fail(self) -> None:
        raise ValueError("as asked for")

    def lent_bytes(self) -> int:
        """The bytes of this process's shared memory that are in use."""
        context = current()
        assert context is not None
        memory = context.runtime.network.memory
        assert memory is not None
        return memory.used


@pytest.mark.timeout(0)
def test_calls_leave_no_resources(rlinf_leak_check, request, figures: Figures):
    """Of UNDER_WAY calls one fails, one result is dropped, and one argument and result travels by shared memory."""
    count, array = request.config.getoption("calls"), bytes(1 << 18)
    with Cluster(num_nodes=1) as cluster:
        group = Callee.create_group().launch(cluster, NodePlacementStrategy([0, 0]))
        first, second = group.execute_on(0), group.execute_on(1)
        agent = cluster._daemon._process.pid
        workers = group.pid().wait()

        def some() -> None:
            second.echo("dropped")
            large = second.echo(array)
            results = [(first if n % 2 else second).echo(n) for n in range(UNDER_WAY - 3)]
            with pytest.raises(ValueError, match="as asked for"):
                first.fail().wait()  # at once: an error that nobody awaits in time is logged, and pytest keeps logs
            assert [result.wait()[0] for result in results] == list(range(UNDER_WAY - 3))
            assert large.wait() == [array]

        def look():
            group.pid().wait()
            pids = {"driver": os.getpid(), "agentd and head": agent, "template": template_of(agent)}
            return [held(name, pid) for name, pid in (*pids.items(), *zip(("rank 0", "rank 1"), workers, strict=True))]

        def lent_bytes() -> list[int]:
            memory = cluster.runtime.network.memory
            assert memory is not None
            return [memory.used, *group.lent_bytes().wait()]

        for _ in range(WARM_UP // UNDER_WAY):
            some()
        before = pace.settled(look)
        for n in range(-(-count // UNDER_WAY)):
            some()
            figures.done((n + 1) * UNDER_WAY, count, "calls") if n % 100 == 0 else None
        figures.done(count, count, "calls")
        assert pace.again_like(lent_bytes, [0, 0, 0]) == [0, 0, 0]
        check(before, pace.again_like(look, before), count, "calls", figures)
