"""The head keeps no object for a worker that the garbage collector looks at: a full collection stops the head.

Workers are many, and a head with 10,000 of them has to announce a death in 10 ms.
"""

from __future__ import annotations

import gc

from head_kit import HeadKit, client_hello, specs
from msgspec.structs import replace

from rlinf_actors.head.commands import NoticeReceived, RequestReceived
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.agent_messages import WorkerReady
from rlinf_actors.wire.client_messages import Launch
from rlinf_actors.wire.control_codec import Notice, Request
from rlinf_actors.wire.values import Endpoint

NODES, GROUPS = 10, 20


def tracked() -> int:
    gc.collect()  # it stops tracking tuples that have only values
    return len(gc.get_objects())


def launch_and_greet(kit: HeadKit, group: str, ids: list[str]) -> None:
    """Launch a worker on each node; each is up and says hello. All messages are decoded, as those of a socket."""

    def received(body):
        return control_codec.decode(control_codec.encode(Request(1, body))).body

    workers = [
        replace(spec, env={"RANK": str(spec.rank)}, sys_path=("/a", "/b")) for spec in specs(group, list(range(NODES)))
    ]
    kit.head.handle(RequestReceived(b"d1", 1, received(Launch("ns", group, "m:C", workers)), LOCAL), kit.now)
    for spec in workers:
        up = WorkerReady(spec.id, 77, Endpoint("h", "ipc://x", "tcp://10.0.0.1:1"), 0, 4000)
        notice = control_codec.decode(control_codec.encode(Notice(up))).body
        kit.head.handle(NoticeReceived(f"a:n{spec.rank}".encode(), notice, LOCAL), kit.now)
        token = kit.head.jobs.token("ns")
        hello = received(client_hello(f"i{spec.id}", role="worker", worker_id=spec.id, token=token))
        kit.head.handle(RequestReceived(f"w{spec.id}".encode(), 1, hello, LOCAL), kit.now)
        ids.append(spec.id)


def test_worker_adds_no_object_that_the_garbage_collector_looks_at():
    kit = HeadKit()
    kit.cluster(NODES)
    ids: list[str] = []
    launch_and_greet(kit, "first", ids)
    before = tracked()
    for n in range(GROUPS):
        launch_and_greet(kit, f"g{n}", ids)
    added = tracked() - before
    assert len(ids) == len(set(ids)) == NODES * (GROUPS + 1)
    assert kit.clients() == 1 + len(ids)
    assert added < NODES * GROUPS  # 7 for each group
