"""Messages of the control plane: how many an operation takes. They may fall, and not rise unnoticed."""

from __future__ import annotations

import pytest
from head_kit import HeadKit

from rlinf_actors.head.commands import Answer, Notify
from rlinf_actors.wire.agent_messages import Beat, StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import StopGroup


@pytest.mark.parametrize("per_node", [1, 10])
def test_a_launch_takes_one_order_a_node_and_one_answer(per_node):
    kit = HeadKit()
    kit.cluster(10)
    kit.launch("g", [rank % 10 for rank in range(10 * per_node)])
    orders = [command for command in kit.out if isinstance(command, Notify) and isinstance(command.body, StartWorkers)]
    assert sorted(order.peer for order in orders) == sorted(f"a:n{n}".encode() for n in range(10))
    assert sum(isinstance(command, (Answer, Notify)) for command in kit.out) == 11


def test_a_stop_takes_one_order_a_node():
    kit = HeadKit()
    kit.cluster(10)
    kit.launch("g", [rank % 10 for rank in range(100)])
    for rank in range(100):
        kit.ready(f"a:n{rank % 10}", f"g-{rank}")
    kit.ask("d1", StopGroup("ns", "g", 1.0))
    orders = [command for command in kit.out if isinstance(command, Notify) and isinstance(command.body, StopWorkers)]
    assert len(orders) == 10


def test_a_beat_takes_one_answer():
    kit = HeadKit()
    kit.cluster(10)
    out = kit.tell("a:n3", Beat("n3-1"))
    assert [type(command.body) for command in out if isinstance(command, (Answer, Notify))] == [Beat]
