"""A group's handle: how the group becomes ready, fails and ends."""

from __future__ import annotations

import asyncio
import gc
import types

import pytest
from fake_worker import FakeWorker, Waiter
from msgspec.structs import replace

from rlinf_actors.errors import (
    GroupClosedError,
    GroupNotFoundError,
    NodeLostError,
    RlinfActorsError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)
from rlinf_actors.runtime.construction import Construction, Readiness
from rlinf_actors.runtime.group_registry import GroupRegistry
from rlinf_actors.runtime.lost_errors import LostErrors
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.worker_ends import death
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.client_messages import WorkerChanged
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupState, WorkerState


class World:
    """Two stand-in workers and the owner's handle of their group."""

    def __init__(self, network, owner=True) -> None:
        self.workers = [FakeWorker(network, f"ipc:///w{rank}") for rank in range(2)]
        self.failed: list[RemoteGroup] = []
        construction = None
        if owner:
            construction = Construction("m:C", [b"args"], 3)
        soon = None if owner else asyncio.get_running_loop().call_soon
        self.group = RemoteGroup(
            network, "driver:x", "here", "ns", "g", ["n0", "n1"], construction, self.failed.append, soon=soon
        )
        self.group.adopt(GroupState("ns", "g", "m:C", "o", "starting", [self.state(0, "starting")], "tok"))

    def state(self, rank, state="running", master_port=0, exit=None, id=None, restarts=0):
        endpoint = Endpoint("here", self.workers[rank].endpoint) if state == "running" else None
        return WorkerState(
            id or f"id-{rank}", rank, rank, f"10.0.0.{rank}", state, 1, endpoint, 0, master_port, exit, restarts
        )


@pytest.fixture
async def world(network):
    return World(network)


class TestReadiness:
    """A group that cannot start, and an owner that may not see the error."""

    @pytest.fixture
    def lost(self):
        return LostErrors(False, lambda seconds, function: None)

    def test_unseen_failure_is_reported(self, lost, caplog):
        ready = Readiness("g", lost)
        ready.reject(WorkerError("no arm"))
        lost.close()
        assert "group 'g' could not be brought up: no arm" in caplog.text

    def test_failure_that_only_a_watcher_learns_of_is_reported(self, lost, caplog):
        ready, ended = Readiness("g", lost), []
        ready.watch(lambda: ended.append(ready.done()))
        ready.reject(WorkerError("no arm"))
        ready.watch(lambda: ended.append("at once"))
        lost.close()
        assert ended == [True, "at once"]
        assert "group 'g' could not be brought up: no arm" in caplog.text

    @pytest.mark.parametrize("look", ["wait", "launch"])
    def test_failure_that_was_raised_is_not_reported(self, lost, look):
        ready = Readiness("g", lost)
        ready.reject(WorkerError("no arm"))
        if look == "wait":
            with pytest.raises(WorkerError, match="no arm"):
                ready.wait()
        else:
            ready.seen()
        lost.close()
        assert lost.count == 0

    def test_shutdown_by_the_owner_is_not_reported(self, lost):
        Readiness("g", lost).reject(GroupClosedError("shut down"))
        lost.close()
        assert lost.count == 0

    def test_failure_of_a_dropped_handle_is_reported_once(self, lost, caplog):
        Readiness("g", lost).reject(WorkerError("no arm"))
        gc.collect()
        lost.close()
        assert lost.count == 1


async def test_workers_are_constructed_after_rank_0_has_reported_its_port(world):
    world.group.update([world.state(1)])
    assert not world.group.peers[1].connected
    world.group.update([world.state(0, master_port=4567)])
    for worker in world.workers:
        join, create = await worker.until(2)
        assert join.token == "tok"
        assert create.env == {"MASTER_ADDR": "10.0.0.0", "MASTER_PORT": "4567"}
        assert (create.cls, create.max_concurrency) == ("m:C", 3)
        assert worker.came[1][1] == [b"args"]


async def test_group_is_ready_when_all_workers_are_constructed(world):
    world.group.update([world.state(0, master_port=1), world.state(1)])
    creates = [(await worker.until(2))[1] for worker in world.workers]
    world.workers[0].say(frames.Ok(creates[0].id))
    world.workers[1].say(frames.Ok(creates[1].id))
    await world.group.ready
    assert world.group._construction.parts == ()


async def test_first_failed_constructor_ends_the_group(world):
    call = Waiter()
    world.group.peers[1].open(call)
    world.group.update([world.state(0, master_port=1), world.state(1)])
    create = (await world.workers[0].until(2))[1]
    world.workers[0].say(frames.Raised(create.id, "raised", "ValueError", "no arm"))
    with pytest.raises(WorkerError, match="no arm"):
        await world.group.ready
    assert str(call.error) == "g:0 on n0 raised ValueError: no arm"
    assert world.failed == [world.group]
    world.group.update([world.state(1, "gone", exit=ExitReport("exited", 1))])
    assert str(world.group.ready.error) == "g:0 on n0 raised ValueError: no arm"


async def test_calls_that_wait_for_a_failed_constructor_get_the_groups_error(world):
    call = Waiter()
    number = world.group.peers[0].open(call)
    world.group.update([world.state(0, master_port=1), world.state(1)])
    create = (await world.workers[0].until(2))[1]
    world.workers[0].say(frames.Raised(number, "raised", "ValueError", "no arm"))
    world.workers[0].say(frames.Raised(create.id, "raised", "ValueError", "no arm"))
    await call.told.wait()
    assert call.answers == []
    assert call.error is world.group.ready.error


async def test_method_error_before_the_constructor_is_confirmed_fails_only_its_call(world):
    call = Waiter()
    number = world.group.peers[0].open(call)
    world.group.update([world.state(0, master_port=1), world.state(1)])
    create = (await world.workers[0].until(2))[1]
    world.workers[0].say(frames.Raised(number, "raised", "ValueError", "bad step"))
    world.workers[0].say(frames.Ok(create.id))
    await call.told.wait()
    assert [answer.text for answer in call.answers] == ["bad step"]
    assert not world.group.ready.done()


async def test_method_error_while_other_workers_are_constructed_fails_only_its_call(world):
    world.group.update([world.state(0, master_port=1), world.state(1)])
    world.workers[0].say(frames.Ok((await world.workers[0].until(2))[1].id))
    call = Waiter()
    number = world.group.peers[0].open(call)
    world.workers[0].say(frames.Raised(number, "raised", "ValueError", "bad step"))
    await call.told.wait()
    assert [answer.text for answer in call.answers] == ["bad step"]


async def test_a_worker_that_ends_before_it_is_ready_ends_the_group(world):
    world.group.update([world.state(0, "gone", exit=ExitReport("start_failed", reason="no such interpreter"))])
    with pytest.raises(WorkerStartError, match="g:0 on n0 could not be started: no such interpreter"):
        await world.group.ready
    assert isinstance(world.group.peers[1].error, WorkerStartError)
    assert world.failed == [world.group]


async def test_death_after_readiness_fails_only_its_rank(world):
    world.group.ready.resolve(None)
    world.group.update([world.state(0, master_port=1), world.state(1)])
    calls = [Waiter(), Waiter()]
    for peer, call in zip(world.group.peers, calls, strict=True):
        peer.open(call)
    world.group.update([world.state(1, "gone", exit=ExitReport("signalled", signal=9))])
    assert isinstance(calls[1].error, WorkerDiedError)
    assert calls[0].error is None
    assert not world.group.gone.done()
    world.group.update([world.state(0, "gone", exit=ExitReport("exited", 0))])
    await world.group.gone


async def test_death_is_reported_once(world):
    world.group.ready.resolve(None)
    world.group.update([world.state(1, "gone", exit=ExitReport("exited", 3))])
    error = world.group.peers[1].error
    world.group.update([world.state(1, "running"), world.state(1, "gone", exit=ExitReport("exited", 4))])
    assert world.group.peers[1].error is error
    assert not world.group.peers[1].connected


async def test_requested_end_is_not_reported_as_a_death(world):
    world.group.ready.resolve(None)
    call = Waiter()
    world.group.peers[0].open(call)
    world.group.closing = True
    world.group.update([world.state(0, "gone", exit=ExitReport("signalled", signal=15))])
    assert isinstance(call.error, GroupClosedError)


async def test_error_says_that_another_process_stopped_the_group(world):
    world.group.ready.resolve(None)
    world.group.update([world.state(0, "gone", exit=ExitReport("stopped", signal=15))])
    assert isinstance(world.group.peers[0].error, GroupClosedError)
    assert "shut down by another process, or its node's agentd was stopped" in str(world.group.peers[0].error)


async def test_close_fails_calls_and_waits(world):
    call = Waiter()
    world.group.peers[0].open(call)
    world.group.close()
    assert isinstance(call.error, GroupClosedError)
    await world.group.gone
    with pytest.raises(GroupClosedError):
        await world.group.ready
    assert world.failed == []


async def test_attached_handle_constructs_nothing_and_links_only_to_called_ranks(network):
    world = World(network, owner=False)
    world.group.peers[0].send(frames.Call(1, "early"))
    world.group.update([world.state(0, master_port=1), world.state(1)])
    assert [type(frame) for frame in await world.workers[0].until(2)] == [frames.Join, frames.Call]
    assert not world.group.peers[1].connected
    assert world.workers[1].came == []
    for call in (2, 3):
        world.group.peers[1].send(frames.Call(call, "x"))
    assert [type(frame) for frame in await world.workers[1].until(3)] == [frames.Join, frames.Call, frames.Call]


class TestReadinessOfAnothersGroup:
    """A process that did not launch the group waits for its workers' reports."""

    async def asked(self, network):
        world = World(network, owner=False)
        world.group.update([world.state(0), world.state(1)])
        ready = world.group.request_ready()
        return world, ready, [(await worker.until(2))[1] for worker in world.workers]

    async def test_attached_group_is_ready_when_all_workers_are(self, network):
        world, ready, questions = await self.asked(network)
        assert [question.constructed for question in questions] == [True, True]
        for worker, question in zip(world.workers, questions, strict=True):
            assert not ready.done()
            worker.say(frames.Runs(question.id, ""))
        await ready

    async def test_failed_constructor_fails_the_attached_group(self, network):
        world, ready, questions = await self.asked(network)
        world.workers[1].say(*failure.encode(questions[1].id, ValueError("no arm")))
        with pytest.raises(WorkerStartError, match="no arm"):
            await ready

    async def test_worker_that_dies_before_construction_fails_the_attached_group(self, network):
        world, ready, _ = await self.asked(network)
        world.group.update([world.state(1, "gone", exit=ExitReport("signalled", signal=9))])
        with pytest.raises(WorkerDiedError):
            await ready

    async def test_rank_that_is_removed_before_its_construction_is_not_waited_for(self, network):
        world, ready, questions = await self.asked(network)
        world.workers[0].say(frames.Runs(questions[0].id, ""))
        world.group.resize(1)
        world.group.update([world.state(1, "gone", exit=ExitReport("exited", 0))])
        await ready

    async def test_restarted_worker_is_queried_again(self, network):
        world, ready, questions = await self.asked(network)
        world.workers[0].say(frames.Runs(questions[0].id, ""))
        world.group.update([world.state(1, id="id-1.1", restarts=1)])
        again = (await world.workers[1].until(4))[3]
        world.workers[1].say(frames.Runs(again.id, ""))
        await ready


async def test_watched_rank_needs_no_link(network):
    world = World(network, owner=False)
    world.group.update([world.state(0), world.state(1)])
    told = []
    world.group.peers[1].on_gone(told.append)
    world.group.update([world.state(1, "gone", exit=ExitReport("signalled", signal=9))])
    assert [type(error) for error in told] == [WorkerDiedError]
    assert not world.group.peers[1].connected


async def test_group_state_matches_by_the_ids_of_its_workers(network):
    world = World(network, owner=False)
    world.group.update([world.state(0), world.state(1)])
    same = GroupState("ns", "g", "", "o", "", [world.state(1), world.state(0)])
    other = GroupState("ns", "g", "", "o", "", [world.state(0), world.state(1, id="of a namesake")])
    assert world.group.matches(same)
    assert not world.group.matches(other)


DEATHS = [
    (ExitReport("signalled", signal=9), "was ended by signal 9 (SIGKILL)"),
    (ExitReport("signalled", signal=63), "was ended by signal 63"),
    (ExitReport("exited", 3), "exited with code 3"),
    (ExitReport("exited", 0), "exited with code 0"),
    (ExitReport("exited"), "ended, and nobody saw how"),
    (ExitReport("signalled", signal=9, oom="yes"), "it was out of memory"),
    (ExitReport("signalled", signal=9, oom="suspected"), "out of memory suspected"),
    (ExitReport("exited", 1, stderr_tail=["one", "two"]), "last lines of its stderr:\n    one\n    two"),
    (ExitReport("exited", 1, reason="its template ended"), "its template ended"),
]


@pytest.mark.parametrize(("report", "text"), DEATHS, ids=[text for _, text in DEATHS])
def test_error_of_a_death_says_how_the_worker_ended(report, text):
    error = death(report, "g:2", 2, "n7")
    assert isinstance(error, WorkerDiedError)
    assert text in str(error)
    assert "worker g:2 on n7" in str(error)
    assert (error.rank, error.node, error.exit_code, error.signal) == (2, "n7", report.exit_code, report.signal)
    assert error.stderr_tail == tuple(report.stderr_tail)
    assert error.oom == report.oom


def test_each_kind_of_death_has_its_error():
    assert isinstance(death(ExitReport("start_failed", reason="x"), "g:0", 0, "n"), WorkerStartError)
    lost = death(ExitReport("node_lost"), "g:0", 0, "n")
    assert isinstance(lost, NodeLostError)
    assert "g:0 is gone with its node n: the node stopped answering" in str(lost)


async def test_head_that_forgot_the_group_gets_ended_ranks_too(network):
    world = World(network, owner=False)
    gone = world.state(1, "gone", exit=ExitReport("exited", 3))
    world.group.update([world.state(0), gone])
    handle = world.group.handle()
    assert [(state.rank, state.state) for state in handle.workers] == [(0, "running"), (1, "gone")]
    assert handle.workers[1].exit == ExitReport("exited", 3)


def _out_of_reach(world, rank, **more):
    """A worker that listens where this process cannot connect."""
    return replace(world.state(rank, **more), endpoint=Endpoint("another machine", "ipc:///w"))


async def test_worker_that_its_owner_cannot_reach_ends_the_group(world):
    world.group.update([world.state(0, master_port=1), _out_of_reach(world, 1)])
    with pytest.raises(RlinfActorsError, match="g:1 on n1 listens on a unix socket only"):
        await world.group.ready
    assert world.failed == [world.group]


async def test_restarted_worker_that_cannot_be_constructed_ends_the_group(world):
    world.group.update([world.state(0, master_port=1), world.state(1)])
    for worker in world.workers:
        worker.say(frames.Ok((await worker.until(2))[1].id))
    await world.group.ready
    call = Waiter()
    world.group.peers[0].open(call)
    world.group.update([_out_of_reach(world, 1, id="id-1.1", restarts=1)])
    assert world.failed == [world.group]
    assert "g:1 on n1 listens on a unix socket only" in str(call.error)


async def test_worker_restarted_before_its_construction_is_constructed(world):
    world.group.update([world.state(0, master_port=1), world.state(1)])
    for worker in world.workers:
        await worker.until(2)
    world.workers[1].say(frames.Ok(world.workers[1].came[1][0].id))
    world.group.update([world.state(0, "restarting", id="id-0.1", restarts=1, exit=ExitReport("exited", 3))])
    assert not world.group.ready.done()
    assert world.failed == []
    assert world.group.peers[0].error is None


async def test_rank_that_is_removed_while_it_is_constructed_again_changes_nothing(world):
    world.group.update([world.state(0, master_port=1), world.state(1)])
    for worker in world.workers:
        worker.say(frames.Ok((await worker.until(2))[1].id))
    await world.group.ready
    world.group.update([world.state(1, id="id-1.1", restarts=1)])
    again = (await world.workers[1].until(4))[3]
    assert isinstance(again, frames.Create)
    world.group.shrink(1)
    world.group.membership.end_removed()
    assert world.group.peers[0].error is None
    assert world.failed == []
    assert world.group.construction.constructed == {0: "id-0"}


async def test_end_of_a_removed_worker_is_not_that_of_the_worker_which_gets_its_rank(world):
    """A restarted head reports the ends of workers again, also of those that had been removed before."""
    world.group.update([world.state(0, master_port=1), world.state(1)])
    for worker in world.workers:
        worker.say(frames.Ok((await worker.until(2))[1].id))
    await world.group.ready
    world.group.shrink(1)
    joined = world.group.begin_growth([("id-1a1", "n1")], [b"args"])
    removed = ExitReport("stopped", reason="it was removed from its group")
    world.group.update([world.state(1, "gone", exit=removed, id="id-1")])
    assert not joined.done()
    world.group.update([world.state(1, id="id-1a1")])
    create = (await world.workers[1].until(4))[3]
    world.workers[1].say(frames.Ok(create.id))
    await joined
    world.group.grow()
    assert [peer.worker_id for peer in world.group.peers] == ["id-0", "id-1a1"]


async def test_registry_does_not_return_a_handle_whose_group_was_not_found(network):
    handles = GroupRegistry(driver(network, Calls()))
    group = handles.of_handle("ns", "g", "abc", ["n0"], 0.0, asyncio.Event().wait)
    assert handles.existing("ns", "g") is group
    group.fail(GroupNotFoundError("it has ended"))
    assert handles.existing("ns", "g") is None


def driver(network, io):
    """The part of a driver's runtime that the registry reads."""
    return types.SimpleNamespace(
        network=network, io=io, identity="driver:x", host="here", worker_id="", ask=None, head=None
    )


class Calls:
    """The part of an I/O thread that the handles use."""

    def call(self, function, *args):
        function(*args)


class TestDeaths:
    """What the owner's log says when workers die."""

    @pytest.fixture
    async def handles(self, network, world):
        made = GroupRegistry(driver(network, None))
        made._groups["ns", "g"] = world.group
        world.group.update([world.state(0, master_port=1), world.state(1)])
        for worker in world.workers:
            worker.say(frames.Ok((await worker.until(2))[1].id))
        await world.group.ready
        return made

    def died(self, world, **exit):
        report = ExitReport(**(exit or {"kind": "signalled", "signal": 9}))
        return WorkerChanged("ns", "g", [world.state(1, "gone", exit=report)])

    async def test_death_without_a_waiting_call_is_logged_once_as_a_warning(self, world, handles, caplog):
        handles.workers_changed(self.died(world))
        handles.workers_changed(self.died(world))
        (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "worker g:1 on n1" in said.getMessage()
        assert "SIGKILL" in said.getMessage()
        assert handles.failures == 1

    async def test_death_with_a_waiting_call_is_not_logged(self, world, handles, caplog):
        call = Waiter()
        world.group.peers[1].open(call)
        handles.workers_changed(self.died(world))
        assert isinstance(call.error, WorkerDiedError)
        assert caplog.text == ""
        assert handles.failures == 1

    async def test_requested_end_of_a_worker_is_not_logged_as_a_death(self, world, handles, caplog):
        handles.workers_changed(self.died(world, kind="stopped"))
        assert caplog.text == ""
        assert handles.failures == 0

    @pytest.mark.parametrize(("group", "code", "failures"), [("channel@c", 0, 0), ("channel@c", 1, 1), ("g", 0, 1)])
    async def test_end_of_a_closed_channels_host_is_not_logged_as_a_death(
        self, world, handles, caplog, group, code, failures
    ):
        world.group.name = group
        handles._groups = {("ns", group): world.group}
        report = ExitReport("exited", code)
        handles.workers_changed(WorkerChanged("ns", group, [world.state(1, "gone", exit=report)]))
        assert handles.failures == failures
        assert (caplog.text == "") == (failures == 0)
