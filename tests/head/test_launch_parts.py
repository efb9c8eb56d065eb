"""Launches that are sent in parts: all workers start, or none; and what the head sends about large groups."""

from __future__ import annotations

import sys

import pytest
from head_kit import HeadKit, running, specs
from head_status import status_of
from msgspec.structs import replace

from rlinf_actors.head.commands import Refuse
from rlinf_actors.head.group_notices import MOST_STATES
from rlinf_actors.head.launch_parts import LAUNCHES
from rlinf_actors.head.quotas import LIMITS
from rlinf_actors.model.restart import launch_of
from rlinf_actors.security.members import Member
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.agent_messages import Goodbye, StartWorkers
from rlinf_actors.wire.client_messages import Done, FindGroup, Handles, Launch, Launched, StopGroup, WorkerChanged
from rlinf_actors.wire.control_codec import Request
from rlinf_actors.wire.launch_messages import (
    PART_BYTES,
    PART_RANKS,
    FindWorker,
    FoundWorker,
    LaunchPart,
    batches_of,
    part_bytes,
    parts_of,
    specs_of,
)
from rlinf_actors.wire.values import Claim, GroupHandle, WorkerSpec, WorkerState

ARM = Claim("Arm:1", "Arm 1", False)


@pytest.fixture
def kit() -> HeadKit:
    kit = HeadKit()
    kit.cluster(2)
    return kit


def parts(workers: list[WorkerSpec], slices: int = 2) -> list[LaunchPart]:
    """The parts of a launch of *workers* without the last one."""
    first, launch = workers[:-1], launch_of(workers[0].id)
    size = -(-len(first) // slices)
    return [
        LaunchPart("ns", workers[0].group, launch, n, batches_of(first[n * size : (n + 1) * size]))
        for n in range(slices)
    ]


def last(workers: list[WorkerSpec], count: int = 2, **more) -> Launch:
    return Launch("ns", workers[0].group, "m:C", workers[-1:], parts=count, **more)


def send(kit: HeadKit, workers: list[WorkerSpec], peer: str = "d1", **more):
    for part in parts(workers):
        assert kit.ask(peer, part) == Done()
        assert kit.sent(StartWorkers) == []
    return kit.ask(peer, last(workers, **more))


def test_workers_of_all_parts_start_when_the_launch_has_arrived(kit):
    workers = specs("g", [0, 0, 1, 1, 1], launch="l")
    launched = send(kit, workers)
    assert [worker.id for worker in launched.group.workers] == [f"l-{rank}" for rank in range(5)]
    started = {node: [spec.id for one in kit.sent(StartWorkers, f"a:n{node}") for spec in one.workers] for node in "01"}
    assert started == {"0": ["l-0", "l-1"], "1": ["l-2", "l-3", "l-4"]}
    assert len(kit.head.launches.parts) == 0


def test_name_is_free_until_the_launch_arrives(kit):
    first, second = parts(specs("g", [0, 0, 1], launch="l"))
    kit.ask("d1", first)
    assert isinstance(kit.launch("g", [0], launch="other"), Launched)
    kit.ask("d1", second)
    refused = kit.ask("d1", last(specs("g", [0, 0, 1], launch="l")))
    assert refused.kind == "name_in_use"
    assert kit.sent(StartWorkers) == []
    assert len(kit.head.launches.parts) == 0


def test_client_that_ends_between_parts_leaves_nothing(kit):
    kit.ask("d1", parts(specs("g", [0, 0, 1], launch="l"))[0])
    kit.tell("d1", Goodbye("it ends"))
    assert len(kit.head.launches.parts) == 0
    assert kit.group_states() == {}
    kit.driver("d2")
    assert isinstance(kit.launch("g", [0], peer="d2"), Launched)


def test_head_that_was_restarted_between_parts_asks_for_all_again(kit):
    workers = specs("g", [0, 0, 1], launch="l")
    first, second = parts(workers)
    kit.ask("d1", first)
    kit.restart()
    for n in range(2):
        kit.node(f"n{n}", ip=f"10.0.0.{n + 1}", is_head=n == 0)
    kit.driver()
    assert kit.ask("d1", second).kind == "parts"
    assert kit.ask("d1", last(workers)).kind == "parts"
    assert kit.sent(StartWorkers) == []
    assert isinstance(send(kit, workers), Launched)


def test_part_that_is_sent_twice_counts_once(kit):
    workers = specs("g", [0, 0, 1], launch="l")
    first, second = parts(workers)
    for part in (first, first, second, first, second):
        assert kit.ask("d1", part) == Done()
    assert [worker.id for worker in kit.ask("d1", last(workers)).group.workers] == ["l-0", "l-1", "l-2"]


def test_launch_whose_answer_was_lost_is_answered_again_without_its_parts(kit):
    workers = specs("g", [0, 0, 1], launch="l")
    send(kit, workers)
    again = kit.ask("d1", last(workers))
    assert [worker.id for worker in again.group.workers] == ["l-0", "l-1", "l-2"]
    assert kit.sent(StartWorkers) == []


def test_launch_that_a_restarted_head_knows_in_part_needs_its_parts_again(kit):
    """Only some of the nodes had got their orders before the head ended."""
    workers = specs("g", [0, 0, 1], launch="l")
    kit.restart()
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[running(spec, "d1") for spec in workers[:2]])
    kit.node("n1", ip="10.0.0.2")
    kit.driver(token="old")
    assert kit.ask("d1", last(workers)).kind == "parts"
    assert isinstance(send_again := send_anew(kit, workers), Launched), send_again
    assert [spec.id for one in kit.sent(StartWorkers, "a:n1") for spec in one.workers] == ["l-2"]


def send_anew(kit: HeadKit, workers: list[WorkerSpec]):
    for part in parts(workers):
        kit.ask("d1", part)
    return kit.ask("d1", last(workers))


def test_repeated_launch_that_waits_for_its_robot_is_answered_once(kit):
    held = [replace(spec, claims=(ARM,)) for spec in specs("arm", [0])]
    assert isinstance(kit.ask("d1", Launch("ns", "arm", "m:C", held)), Launched)
    workers = [replace(spec, claims=(ARM,) if spec.rank == 0 else ()) for spec in specs("g", [0, 0, 1], launch="l")]
    assert send(kit, workers, wait_s=60.0) is None
    assert kit.ask("d1", last(workers, wait_s=60.0)) is None  # over a new connection, without the parts
    kit.ask("d1", StopGroup("ns", "arm", 1.0))
    kit.exited("a:n0", "arm-0")
    answers = [body for _, body in kit.answers() if isinstance(body, Launched)]
    assert [[worker.id for worker in body.group.workers] for body in answers] == [["l-0", "l-1", "l-2"]]


def test_stopped_launch_forgets_its_parts(kit):
    kit.ask("d1", parts(specs("g", [0, 0, 1], launch="l"))[0])
    assert kit.ask("d1", StopGroup("ns", "g", 1.0, ["l-0"])) == Done()
    assert len(kit.head.launches.parts) == 0


def test_first_part_of_another_launch_replaces_the_parts_of_the_one_before(kit):
    kit.ask("d1", parts(specs("g", [0, 0, 1], launch="l"))[0])
    workers = specs("g", [0, 1, 1], launch="m")
    assert [worker.id for worker in send(kit, workers).group.workers] == ["m-0", "m-1", "m-2"]


@pytest.mark.parametrize("part", [1, 2])
def test_part_after_a_gap_is_refused(kit, part):
    workers = specs("g", [0] * 7, launch="l")
    found = kit.ask("d1", replace(parts(workers, 3)[part], index=part))
    assert isinstance(found, Refuse)
    assert found.kind == "parts"


def test_parts_of_another_namespace_are_refused(kit):
    kit.driver("d2", namespace="else")
    refused = kit.ask("d2", parts(specs("g", [0, 0, 1], launch="l"))[0])
    assert refused.kind == "authentication"


def test_number_of_begun_launches_is_limited(kit):
    for n in range(LAUNCHES):
        assert kit.ask("d1", parts(specs(f"g{n}", [0, 0], launch=f"l{n}"), 1)[0]) == Done()
    refused = kit.ask("d1", parts(specs("more", [0, 0], launch="m"), 1)[0])
    assert refused.kind == "usage"
    assert f"{LAUNCHES} launches" in refused.text


def test_parts_of_a_key_are_limited_from_the_first(kit, monkeypatch):
    monkeypatch.setitem(LIMITS, "launch parts", LIMITS["launch parts"]._replace(most=1))
    monkeypatch.setattr(HeadKit, "member", lambda self, peer: Member("driver", "ann", key="k" * 40))
    monkeypatch.setattr(kit.head.keys, "admit", lambda *_: Member("driver", "ann", key="k" * 40))
    kit.driver("d3", namespace="ann")
    workers = [replace(spec, namespace="ann") for spec in specs("g", [0, 0, 1], launch="l")]
    first, second = (replace(part, namespace="ann") for part in parts(workers))
    assert kit.ask("d3", first) == Done()
    refused = kit.ask("d3", second)
    assert refused.kind == "usage"
    assert "parts of launches" in refused.text


def test_part_with_too_many_bytes_is_refused(kit):
    workers = [replace(spec, env={f"RANK{spec.rank}": "x" * PART_BYTES}) for spec in specs("g", [0, 0, 0], launch="l")]
    refused = kit.ask("d1", parts(workers, 1)[0])
    assert refused.kind == "usage"


def test_part_with_too_many_workers_is_refused(kit):
    one = parts(specs("g", [0] * 1500, launch="l"), 1)[0]
    refused = kit.ask("d1", replace(one, workers=[batch for batch in one.workers for _ in range(2)]))
    assert refused.kind == "usage"
    assert "2,000 workers" in refused.text


# --- what is sent ---


def of_size(size: int) -> list[WorkerSpec]:
    shared = {f"VARIABLE_{n}": f"value number {n}" for n in range(20)}
    return [
        WorkerSpec(
            f"l-{rank}", "g", "ns", rank, size, rank % 1000,
            {**shared, "RANK": f"{rank}", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"},
            sys_path=("/opt/project", "/opt/venv/lib/python3.11/site-packages"), cwd="/opt/project",
        )
        for rank in range(size)
    ]  # fmt: skip


def test_parts_have_all_workers_and_stay_within_their_limits():
    workers = of_size(5001)
    sent = list(parts_of(workers))
    assert [spec for batches in sent for spec in specs_of(batches)] == workers
    assert len(sent) == 3
    assert all(part_bytes(batches) < 100 * PART_RANKS for batches in sent)


def test_workers_that_share_no_fields_are_in_one_part_each_with_their_own():
    workers = [
        replace(
            spec, code_paths=(f"/code/{spec.node_rank}",), env={f"ONLY{spec.rank}": "1"}, numa_nodes=(spec.rank % 2,)
        )
        for spec in of_size(10)
    ]
    assert sorted(specs_of(batches_of(workers)), key=lambda spec: spec.rank) == workers


def test_workers_with_large_environments_make_smaller_parts():
    workers = [replace(spec, env={**spec.env, "LARGE": f"{spec.rank} " * 2000}) for spec in of_size(1000)]
    sent = list(parts_of(workers))
    assert [spec for batches in sent for spec in specs_of(batches)] == workers
    assert max(map(part_bytes, sent)) <= PART_BYTES


def test_part_of_a_launch_fits_into_a_message():
    part = LaunchPart("ns", "g", "l", 0, next(parts_of(of_size(PART_RANKS))))
    assert control_codec.decode(control_codec.encode(Request(1, part))) == Request(1, part)


def test_states_of_a_large_group_are_sent_in_slices(kit):
    size = 2 * MOST_STATES + 3
    launched = kit.launch("g", [0] * size, launch="l")
    told = kit.sent(WorkerChanged, "d1")
    states = [*launched.group.workers, *(worker for notice in told for worker in notice.workers)]
    assert [worker.rank for worker in states] == list(range(size))
    assert max(len(notice.workers) for notice in told) <= MOST_STATES
    kit.driver("d2")
    found = kit.ask("d2", FindGroup("ns", "g"))
    assert len(found.group.workers) == MOST_STATES
    assert found.group.world_size == size
    assert sum(len(notice.workers) for notice in kit.sent(WorkerChanged, "d2")) == size - MOST_STATES


def test_few_nodes_get_the_description_of_a_group():
    kit = HeadKit()
    kit.cluster(10)
    kit.ask("d1", Launch("ns", "g", "m:C", specs("g", list(range(10))), "placements"))
    assert sorted(order.detail for order in kit.sent(StartWorkers)) == [""] * 7 + ["placements"] * 3


@pytest.mark.parametrize("knows", ["node", "owner"])
def test_restarted_head_learns_the_description_of_a_group(knows):
    kit = HeadKit()
    kit.cluster(2)
    workers = specs("g", [0, 1])
    kit.ask("d1", Launch("ns", "g", "m:C", workers, "placements"))
    kit.restart()
    detail = "placements" if knows == "node" else ""
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[running(workers[0], "d1")])
    kit.node("n1", ip="10.0.0.2", workers=[running(workers[1], "d1", detail=detail)])
    kit.driver(token="old")
    known = [WorkerState(f"g-{rank}", rank, rank, "10.0.0.1", "starting") for rank in range(2)]
    kit.tell("d1", Handles([GroupHandle("ns", "g", known, "placements" if knows == "owner" else "")]))
    assert [group.detail for group in status_of(kit.head, kit.now).groups] == ["placements"]


# --- one worker ---


def test_one_worker_is_one_record(kit):
    kit.launch("g", [0, 0, 1])
    found = kit.ask("d1", FindWorker("ns", "g", 1))
    assert isinstance(found, FoundWorker)
    assert (found.worker.id, found.worker.state, found.world_size) == ("g-1", "starting", 3)
    kit.ready("a:n0", "g-1")
    assert kit.ask("d1", FindWorker("ns", "g", 1)).worker.state == "running"


@pytest.mark.parametrize(("group", "rank"), [("h", 0), ("g", 3), ("g", -1)])
def test_unknown_worker_is_not_found(kit, group, rank):
    kit.launch("g", [0, 0, 1])
    assert kit.ask("d1", FindWorker("ns", group, rank)) == FoundWorker()


def test_worker_of_another_job_is_not_shown(kit):
    kit.launch("g", [0])
    kit.driver("d2", namespace="else")
    assert kit.ask("d2", FindWorker("ns", "g", 0)).kind == "authentication"


def lines(action) -> int:
    """The number of lines of the head that *action* executes."""
    count = 0

    def line(frame, event, argument):
        nonlocal count
        count += event == "line"
        return line

    sys.settrace(lambda frame, event, argument: line if "rlinf_actors" in frame.f_code.co_filename else None)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("operation", ["launch", "find", "stop", "ready"])
def test_cost_at_the_head_grows_linearly_with_the_ranks(operation):
    costs = []
    for size in (100, 1000):
        kit = HeadKit()
        kit.cluster(2)
        workers = specs("g", [0] * size, launch="l")
        actions = {
            "launch": lambda workers=workers, kit=kit: send(kit, workers),
            "find": lambda kit=kit: kit.ask("d1", FindWorker("ns", "g", 7)),
            "stop": lambda kit=kit: kit.ask("d1", StopGroup("ns", "g", 1.0)),
            "ready": lambda kit=kit, size=size: [kit.ready("a:n0", f"l-{rank}") for rank in range(size)],
        }
        if operation != "launch":
            send(kit, workers)
        costs.append(lines(actions[operation]))
    few, many = costs
    assert many <= (few if operation == "find" else 11 * few)
