"""A driver that evaluates each line of its stdin and answers with JSON: [class of the error or "", value].

The names: `launch(group, nodes)` gives the workers' process ids, `group(name)` the group; `start(name, result)` keeps a
result, `end(name)` waits for it; `first(name, stream)` keeps a stream and gives its first item, `rest(name)` those
behind it; `define(source)` runs definitions of a test here.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from partition_workers import Talker

from rlinf_actors import Cluster, NodePlacementStrategy, RestartPolicy

groups: dict[str, Any] = {}
started: dict[str, tuple[float, Any]] = {}
streams: dict[str, Any] = {}


def launch(name: str, nodes: list[int], restarts: bool = False) -> list[int]:
    policy = RestartPolicy.on_failure() if restarts else None
    made = Talker.create_group(sys.argv[1]).launch(cluster, NodePlacementStrategy(nodes), name=name, restart=policy)
    groups[name] = made.wait_ready(30)
    return made.pid().wait(30)


def group(name: str) -> Any:
    return groups[name]


def start(name: str, result: Any) -> None:
    started[name] = (time.monotonic(), result)


def end(name: str) -> Any:
    began, result = started.pop(name)
    try:
        return result.wait(60)
    finally:
        print(f"{name} took {time.monotonic() - began:.2f} s", file=sys.stderr)


def first(name: str, stream: Any) -> Any:
    streams[name] = iter(stream)
    return next(streams[name])


def define(source: str) -> None:
    exec(source, globals())


def rest(name: str) -> list[Any]:
    return list(streams.pop(name))


with Cluster(num_nodes=int(sys.argv[2]), timeout=60) as cluster:
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            said = ["", eval(line)]
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            said = [type(error).__name__, str(error)]
        print(json.dumps(said), flush=True)
