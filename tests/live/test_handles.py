"""Handles of groups as values: arguments, results, messages, items, and parts of any object."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import sys
import warnings

import handle_workers as hw
import live_workers as lw
import pytest

from rlinf_actors import (
    AsyncWork,
    Channel,
    GroupClosedError,
    GroupNotFoundError,
    NodePlacementStrategy,
    PlacementError,
    SerializationError,
    UsageError,
    WorkerAddress,
    WorkerDiedError,
    WorkerGroup,
)
from rlinf_actors.model.restart import RestartPolicy

pytestmark = pytest.mark.live


@pytest.fixture
def counter(cluster):
    """Two workers that are called through handles."""
    return lw.many(cluster, hw.Counter, 2, name="counter")


@pytest.fixture
def holder(cluster):
    """A worker that gets handles."""
    return lw.many(cluster, hw.Holder, 1, name="holder")


def test_handle_arrives_as_an_argument(counter, holder):
    assert holder.calls(counter, 3).wait() == [[3, 3]]
    assert counter.add(1).wait() == [4, 4]


def test_view_arrives_as_an_argument(counter, holder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert holder.calls(counter.execute_on(1), 3).wait() == [[3]]
        assert holder.calls(counter.worker_info_list[0].worker, 5).wait() == [[5]]
        assert holder.streams(counter.execute_on(1)).wait() == [[0, 1, 2]]


def test_calls_of_one_process_through_a_handle_keep_their_order(counter, holder):
    sums = [sum(range(i + 1)) for i in range(50)]
    assert holder.calls_in_order(counter, 50).wait() == [sums]
    assert counter.order().wait()[0] == [0, *range(50)]


def test_handles_arrive_inside_an_object(counter, holder):
    box = hw.Box({"a": [counter, counter.execute_on(0)], "b": [counter.execute_on([1])]})
    assert holder.calls_inside(box).wait() == [[[1, 1], [2], [2]]]


def test_handle_arrives_as_an_argument_of_a_constructor(cluster, counter):
    group = hw.Holder.create_group(counter).launch(cluster, NodePlacementStrategy([0]), name="constructed")
    assert group.calls_own().wait() == [[1, 1]]


def test_owner_gets_its_own_handle_back_as_a_result(cluster, counter):
    group = hw.Holder.create_group(counter).launch(cluster, NodePlacementStrategy([0]), name="giver")
    [back] = group.gives().wait()
    assert isinstance(back, WorkerGroup)
    assert back.control.group is counter.control.group
    assert back.add(2).wait() == [2, 2]


def test_handle_arrives_as_a_message_and_in_a_broadcast(cluster, counter, holder):
    other = lw.many(cluster, hw.Holder, 1, name="other")
    got = other.receives("holder")
    holder.sends(counter, "other").wait()
    assert got.wait() == [[1, 1]]
    members = [("holder", 0), ("other", 0)]
    works = [holder.broadcasts(counter, members, ("holder", 0)), other.broadcasts(None, members, ("holder", 0))]
    for results in zip(*(work.wait()[0] for work in works), strict=True):  # the two calls reach each rank in any order
        assert sorted(results) == [2, 3]


def test_handle_arrives_as_an_item_of_a_channel(cluster, counter, holder):
    channel = Channel.create("of-handles")
    channel.put({"handle": counter.execute_on(1)})
    assert channel.get()["handle"].add(1).wait() == [1]
    channel.put(counter)
    assert holder.takes(channel).wait() == [[1, 2]]
    holder.puts(channel, counter).wait()
    assert channel.get().control.group is counter.control.group
    channel.close()


def test_received_handle_shows_name_size_and_ranks(counter, holder):
    text = "<WorkerGroup 'counter' of 2 Counter>"
    assert holder.facts(counter).wait() == [(text, 2, [0, 1], 2, False)]


def test_worker_can_be_called_by_its_address(counter, holder):
    assert holder.calls_address(hw.Counter, WorkerAddress("counter", 1)).wait() == [[1]]
    assert holder.calls_address(hw.Counter, WorkerAddress("counter")).wait() == [[1, 2]]
    with pytest.raises(PlacementError, match="rank 7 is not in group 'counter'"):
        WorkerGroup.from_address(hw.Counter, WorkerAddress("counter", 7))
    with pytest.raises(UsageError, match="take the worker's address, counter:1"):
        WorkerGroup.from_address(hw.Counter, WorkerAddress("counter", (1, 0)))
    with pytest.raises(GroupNotFoundError):
        WorkerGroup.from_address(hw.Counter, WorkerAddress("nowhere", 0))


def test_handle_can_be_pickled_and_copied_by_the_user(counter):
    for again in (pickle.loads(pickle.dumps(counter)), copy.copy(counter), copy.deepcopy([counter])[0]):  # noqa: S301
        assert again is not counter
        assert again.control.group is counter.control.group
    view = counter.execute_on(1)
    for again in (pickle.loads(pickle.dumps(view)), copy.copy(view), copy.deepcopy(view)):  # noqa: S301
        assert repr(again) == repr(view)
    assert view.add(1).wait() == [1]


def test_handle_works_in_a_worker_that_lacks_the_class(cluster, holder, tmp_path, monkeypatch, request):
    module = tmp_path / "only_here.py"
    module.write_text(
        "from rlinf_actors import Worker\n"
        "class Gone(Worker):\n"
        "    def add(self, n=1): return n + 1\n"
        "    def _secret(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    request.addfinalizer(lambda: sys.modules.pop("only_here"))
    group = lw.many(cluster, only_here.Gone, 1, name="only-here")
    group.add().wait()
    module.unlink()
    assert holder.calls(group, 4).wait() == [[5]]
    assert holder.private(group).wait() == [
        "Gone._secret() is private (its name begins with _) and cannot be called on a group"
    ]


def test_received_handle_reports_a_death(counter, holder):
    [(kind, text)] = holder.kills(counter.execute_on(1)).wait()
    assert kind == "WorkerDiedError"
    assert "counter:1" in text
    assert "signal 9" in text
    assert [kind for kind, _ in holder.error(counter).wait()] == ["WorkerDiedError"]
    assert holder.calls(counter.execute_on(0)).wait() == [[2]]
    with pytest.raises(WorkerDiedError):
        counter.add().wait()


def test_received_handle_follows_a_restart(cluster, holder):
    policy = RestartPolicy.on_failure(backoff_s=0.01)
    group = hw.Counter.create_group(10).launch(cluster, NodePlacementStrategy([0]), name="phoenix", restart=policy)
    assert holder.calls(group).wait() == [[11]]
    assert holder.kills(group).wait()[0][0] == "WorkerDiedError"
    assert holder.calls(group).wait() == [[11]]


def test_handle_of_a_group_that_has_ended_raises(counter, holder):
    holder.keeps(counter).wait()
    counter.shutdown()
    kind, text = holder.error(counter).wait()[0]
    assert kind == "GroupClosedError"
    assert "its group 'counter' was shut down" in text


def test_handle_of_an_ended_group_does_not_reach_a_group_of_the_same_name(cluster, counter, holder):
    old = pickle.dumps(counter)
    counter.shutdown()
    again = lw.many(cluster, hw.Counter, 2, name="counter")
    again.add().wait()
    kind, text = holder.error(pickle.loads(old)).wait()[0]  # noqa: S301
    assert kind == "GroupNotFoundError"
    assert "another one has its name" in text
    assert holder.calls(again).wait() == [[2, 2]]


def test_received_handle_can_shut_the_group_down(counter, holder):
    holder.shuts_down(counter).wait()
    with pytest.raises(GroupClosedError):
        counter.add().wait()


def test_worker_that_waits_for_itself_through_a_handle_gets_an_error(holder):
    said = holder.waits_for_itself(holder).wait()[0]
    assert said.startswith("UsageError: holder:0 waits for its own gives()")


def test_handle_of_another_namespace_is_refused(counter, monkeypatch):
    carried = pickle.dumps(counter)
    monkeypatch.setattr(counter.control.runtime, "namespace", "elsewhere")
    foreign = pickle.loads(  # noqa: S301
        carried.replace(counter.control.group.namespace.encode(), b"x" * len(counter.control.group.namespace))
    )
    with pytest.raises(UsageError, match="belongs to job 'xxx"):
        foreign.add().wait()


def test_result_that_was_not_awaited_cannot_be_pickled(cluster, counter, holder):
    first = r"args\[0\] cannot be pickled: it is the "
    result, stream, channel = counter.add(1), counter.count(1), Channel.create("of-results")
    works = [
        (result, r"result of add\(\), which was not awaited.*as in group.step\(await other.add\(\)\)"),
        (stream, r"stream of count\(\), which its caller alone can iterate"),
        (AsyncWork("recv()"), r"AsyncWork of recv\(\), not its result"),
    ]
    for work, said in works:
        with pytest.raises(SerializationError, match=first + said):
            holder.calls(work)
        with pytest.raises(SerializationError, match=said):
            channel.put({"work": [work]})
        with pytest.raises(SerializationError, match=said):
            hw.Holder.create_group(work).launch(cluster, NodePlacementStrategy([0]), name="constructed")
    holder.keeps(counter).wait()
    with pytest.raises(SerializationError, match="result of add"):
        holder.returns_a_result().wait()
    result.wait()
    channel.close()


class TestInALoop:
    def test_calls_wait_for_the_look_up_and_for_the_launch(self, cluster):
        async def use() -> None:
            caller = hw.AsyncHolder.create_group().launch(cluster, NodePlacementStrategy([0]), name="caller")
            await caller
            group = hw.Counter.create_group().launch(cluster, NodePlacementStrategy([0]), name="counter")
            first = caller.calls(group)  # its launch has not been answered
            assert await first == [[0, 1, 3, 6, 10]]
            assert await caller.awaits(group) == [""]
            await group.shutdown()
            with pytest.raises(GroupClosedError):
                await caller.calls(group)

        asyncio.run(use())

    def test_group_can_be_passed_to_the_constructor_of_another(self, cluster):
        async def use() -> None:
            group = hw.Counter.create_group().launch(cluster, NodePlacementStrategy([0]), name="counter")
            next_one = hw.Holder.create_group(group).launch(cluster, NodePlacementStrategy([0]), name="next")
            assert await next_one.calls_own() == [[1]]

        asyncio.run(use())


class TestReadiness:
    """`await group` also waits for the constructors if another process made the handle."""

    @pytest.fixture
    def gate(self, tmp_path):
        path = tmp_path / "gate"
        os.mkfifo(path)
        return path

    def test_await_of_a_received_handle_waits_for_the_constructors(self, cluster, gate):
        caller = lw.many(cluster, hw.AsyncHolder, 1, name="caller")
        group = lw.many(cluster, hw.Gated, 1, str(gate), name="gated")
        waits = caller.awaits(group)
        with open(gate, "w"):
            assert not waits.done()
        assert waits.wait() == [""]
        assert group.wait_ready() is group

    def test_await_of_a_received_handle_raises_a_constructors_error(self, cluster, gate):
        caller = lw.many(cluster, hw.AsyncHolder, 1, name="caller")
        group = lw.many(cluster, hw.Gated, 1, str(gate), True, name="gated")
        waits = caller.awaits(group)
        with open(gate, "w"):
            assert not waits.done()
        with pytest.raises(ValueError, match="as it was told"):
            group.wait_ready()
        [said] = waits.wait()
        assert said.startswith(("WorkerStartError: ", "GroupClosedError: "))

    def test_running_group_is_ready_although_it_is_busy(self, cluster, gate):
        caller = lw.many(cluster, hw.AsyncHolder, 1, name="caller")
        group = lw.many(cluster, hw.Gated, 1, name="gated")
        busy = group.opens(str(gate))
        assert caller.awaits(group).wait() == [""]
        assert not busy.done()
        with open(gate, "w"):
            pass
        busy.wait()
