"""The accelerators' locks: exclusion, order, all or nothing, no lost wake-up; and the devices of a worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.device_locks import DeviceRequest, LockTable, devices_of
from rlinf_actors.wire.values import HardwareReport, ResourceReport, WorkerSpec


def want(worker: str, *devices: str, number: int = 1) -> DeviceRequest:
    return DeviceRequest(worker, number, frozenset(devices))


def names(granted: list[DeviceRequest]) -> list[str]:
    return [one.worker for one in granted]


def test_locks_are_granted_in_the_order_of_requests():
    table = LockTable()
    assert names(table.ask(want("a", "0"))) == ["a"]
    assert table.ask(want("b", "0")) == []
    assert table.ask(want("c", "0")) == []
    assert names(table.ask(want("d", "1"))) == ["d"]
    assert names(table.release("a", 1)) == ["b"]
    assert names(table.remove("b")) == ["c"]


def test_a_worker_with_two_accelerators_is_not_overtaken_on_either():
    table = LockTable()
    table.ask(want("a", "0"))
    assert table.ask(want("both", "0", "1")) == []
    assert table.ask(want("late", "1")) == []
    assert table.ahead_of("late") == ([], ["both"])
    assert table.ahead_of("both") == (["a"], [])
    assert names(table.release("a", 1)) == ["both"]
    assert names(table.release("both", 1)) == ["late"]


def test_worker_that_leaves_the_queue_admits_the_next():
    table = LockTable()
    table.ask(want("a", "0"))
    table.ask(want("both", "0", "1"))
    table.ask(want("late", "1"))
    assert names(table.release("both", 1)) == ["late"]
    assert table.release("a", 1) == []


def test_release_of_an_earlier_request_leaves_the_next_one():
    table = LockTable()
    table.ask(want("a", "0", number=1))
    table.release("a", 1)
    table.ask(want("a", "0", number=2))
    table.ask(want("b", "0"))
    assert table.release("a", 1) == []
    assert names(table.release("a", 2)) == ["b"]


def test_new_request_goes_to_the_end_of_the_queue():
    table = LockTable()
    table.ask(want("a", "0"))
    table.ask(want("b", "0"))
    assert names(table.ask(want("a", "0", number=2))) == ["b"]


def test_request_without_devices_never_waits():
    table = LockTable()
    table.ask(want("a", "0"))
    assert names(table.ask(want("b"))) == ["b"]


workers = st.sampled_from("abcdef")
devices = st.frozensets(st.sampled_from("0123"), min_size=1)
steps = st.lists(st.one_of(st.tuples(st.just("ask"), workers, devices), st.tuples(st.just("end"), workers)))


@given(steps, st.randoms())
def test_locks_are_exclusive_in_order_and_never_lost_in_any_history(history, random):
    table = LockTable()
    held: dict[str, DeviceRequest] = {}
    queue: list[DeviceRequest] = []
    for number, step in enumerate(history):
        worker = step[1]
        if step[0] == "ask":
            if worker in held or any(one.worker == worker for one in queue):
                continue
            wanted = DeviceRequest(worker, number, step[2])
            queue.append(wanted)
            granted = table.ask(wanted)
        else:
            request = held.pop(worker, None) or next((one for one in queue if one.worker == worker), None)
            queue = [one for one in queue if one.worker != worker]
            gone = random.random() < 0.5 or request is None
            granted = table.remove(worker) if gone else table.release(worker, request.number)
        for one in granted:
            assert not any(one.devices & other.devices for other in held.values()), (
                "a device has two holders, or a worker only some of its devices"
            )
            assert not any(one.devices & other.devices for other in queue[: queue.index(one)]), (
                "a request was overtaken"
            )
            queue.remove(one)
            held[one.worker] = one
        for place, one in enumerate(queue):
            reasons = [*held.values(), *queue[:place]]
            assert any(one.devices & other.devices for other in reasons), (
                "a request waits although its devices are free"
            )


# --- which devices ---


def gpus(*uuids: str, kind: str = "NV_GPU", indices: tuple[int, ...] | None = None) -> ResourceReport:
    numbers = indices or tuple(range(len(uuids)))
    infos = [HardwareReport(kind, "A800", {"index": i, "uuid": u}) for i, u in zip(numbers, uuids, strict=True)]
    return ResourceReport(kind, infos)


def worker(ranks: str, kind: str = "NV_GPU", **env: str) -> WorkerSpec:
    found = {"ACCELERATOR_TYPE": kind, "LOCAL_HARDWARE_RANKS": ranks, **env}
    return WorkerSpec("id", "g", "ns", 0, 1, 0, found)


@pytest.mark.parametrize(
    ("spec", "resources", "expected"),
    [
        (worker("0,2"), [gpus("u0", "u1", "u2")], {"u0", "u2"}),
        (worker("1", ISOLATE_ACCELERATOR="0", VISIBLE_DEVICES="0,1,2"), [gpus("u0", "u1", "u2")], {"u1"}),
        (worker("1"), [gpus("", "", indices=(4, 5))], {"NV_GPU 5"}),
        (worker("0"), [gpus("MIG-a", "MIG-b", indices=(0, 0))], {"MIG-a"}),
        (worker("1"), [ResourceReport("Franka", [HardwareReport("Franka", "FR3")]), gpus("u0", "u1")], {"u1"}),
        (worker("0"), [ResourceReport("Accelerator", gpus("n0", kind="NPU").infos)], {"n0"}),
        (worker("", kind="NV_GPU"), [gpus("u0", "u1")], {"u0", "u1"}),
        (worker("0", kind="NO_ACCEL"), [gpus("u0")], set()),
        (worker("0", kind=""), [gpus("u0")], set()),
        (worker("0,7"), [gpus("u0")], {"u0"}),
        (worker(f"²,{'9' * 5000},-1, 0 "), [gpus("u0", "u1")], {"u0"}),
    ],
    ids=[
        "its own",
        "seen too",
        "no uuid",
        "slices",
        "robots",
        "older type",
        "on the node",
        "none",
        "unset",
        "fewer",
        "no numbers",
    ],
)
def test_devices_of_a_worker_are_physical_ones(spec, resources, expected):
    assert devices_of(spec, resources) == expected
