"""A driver with a key: `keyed_handles_driver.py send|leave|find`; prints what came of it on one line."""

from __future__ import annotations

import sys
from typing import Any

import detached_workers as dw
import handle_workers as hw

from rlinf_actors import AuthenticationError, Channel, Cluster, NodePlacementStrategy, WorkerGroup


def send(cluster: Cluster) -> Any:
    """Handles between nodes, in every way."""
    counter = hw.Counter.create_group().launch(cluster, NodePlacementStrategy([1]), name="counter")
    holder = hw.Holder.create_group(counter).launch(cluster, NodePlacementStrategy([0]), name="holder")
    other = hw.Holder.create_group().launch(cluster, NodePlacementStrategy([0]), name="other")
    got = [*holder.calls(counter).wait(), *holder.calls_own().wait()]
    received = other.receives("holder")
    holder.sends(counter, "other").wait()
    got += received.wait()
    channel = Channel.create("handles", node_rank=1)
    channel.put(counter.execute_on(0))
    return [*got, *holder.takes(channel).wait()]


def main() -> None:
    """Do what the argument says."""
    try:
        cluster = Cluster(num_nodes=2, namespace="standing")
    except AuthenticationError as error:
        print(f"AuthenticationError: {error}", flush=True)
        return
    if sys.argv[1] == "send":
        print(send(cluster), flush=True)
    elif sys.argv[1] == "leave":
        group = dw.Keeper.create_group().launch(cluster, NodePlacementStrategy([1]), name="left", detached=True)
        print(group.keep("it").wait(), flush=True)
    else:
        found = WorkerGroup.from_group_name(dw.Keeper, "left")
        print(found.keep("too").wait(), flush=True)


if __name__ == "__main__":
    main()
