"""What a worker is and has: its thread, its environment, its ports; streams, deadlines and cancelling, for real."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys

import live_workers as lw
import pytest

from rlinf_actors import CallTimeoutError, UsageError, WorkerAddress
from rlinf_actors.group.stream import WINDOW

pytestmark = pytest.mark.live

SECTION_4 = (
    "GROUP_NAME", "WORKER_NAME", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "NODE_RANK", "CLUSTER_NODE_RANK", "NODE_LOCAL_RANK", "NODE_LOCAL_WORLD_SIZE", "LOCAL_ACCELERATOR_RANK",
    "VISIBLE_DEVICES", "ACCELERATOR_TYPE", "ACCELERATOR_MODEL", "ISOLATE_ACCELERATOR", "LOCAL_HARDWARE_RANKS",
    "NODE_GROUP_LABEL", "CLUSTER_NAMESPACE",
)  # fmt: skip


class TestProcess:
    def test_calls_run_on_the_main_thread_beside_one_io_thread(self, cluster):
        about = lw.Greeter.create_group().launch(cluster).about().wait()[0]
        assert about["main"]
        assert about["current"]
        assert about["session"]
        assert about["stdin"] == "/dev/null"
        assert about["threads"] == ["MainThread", "rlinf-actors-worker-io"]
        assert about["pid"] != os.getpid()
        assert about["executable"] == sys.executable

    def test_max_concurrency_gives_a_worker_several_threads(self, cluster):
        group = lw.Greeter.create_group().launch(cluster, max_concurrency=3)
        group.greet().wait()
        assert len(group.about().wait()[0]["threads"]) == 4
        blocked = [group.block(), group.block()]
        assert group.greet().wait() == ["hello you from 0"]
        assert not any(result.done() for result in blocked)

    def test_async_methods_share_one_loop_of_the_main_thread(self, cluster):
        group = lw.Looped.create_group().launch(cluster)
        waiting = group.wait_for_gate()
        assert group.plain().wait() == [True]
        group.open_gate().wait()
        assert waiting.wait() == ["through"]

    def test_worker_stays_reachable_while_a_method_spins(self, cluster):
        group = lw.Greeter.create_group().launch(cluster, name="busy")
        group.wait_ready()
        spinning = group.spin()
        assert lw.Greeter.create_group().launch(cluster, name="other").alive("busy:0").wait() == [True]
        queued = group.greet()
        queued.cancel()
        spinning.cancel()
        group.shutdown(grace=0.0)

    def test_worker_attributes_have_the_values_of_its_placement(self, cluster):
        first, second = lw.many(cluster, lw.Greeter, 2, name="attrs").attributes().wait()
        assert second == {
            "_rank": 1, "_world_size": 2, "_group_name": "attrs", "_worker_name": "attrs:1", "_cluster_node_rank": 0,
            "_node_local_rank": 1, "_node_local_world_size": 2, "_local_rank": second["_local_rank"],
            "_local_world_size": second["_local_world_size"], "_local_accelerator_rank": -1,
            "_accelerator_type": first["_accelerator_type"], "_accelerator_model": "",
            "_local_hardware_ranks": second["_local_hardware_ranks"],
        }  # fmt: skip
        assert first["_rank"] == 0

    def test_worker_knows_its_rank_group_and_node(self, cluster):
        info = lw.many(cluster, lw.Greeter, 2, name="infos").who().wait()[1]
        assert info.address == WorkerAddress("infos", 1)
        assert (info.rank, info.group_world_size, info.cluster_node_rank, info.node_ip) == (1, 2, 0, "127.0.0.1")

    def test_is_alive_reports_the_state_of_workers(self, cluster):
        group = lw.Greeter.create_group().launch(cluster, name="asks")
        other = lw.Greeter.create_group().launch(cluster, name="asked").wait_ready()
        assert group.alive("asked:0").wait() == [True]
        assert group.alive("asked:1").wait() == [False]
        other.shutdown()
        assert group.alive("asked:0").wait() == [False]


class TestEnvironment:
    def test_worker_environment_has_every_documented_variable(self, cluster):
        first, second = lw.many(cluster, lw.Greeter, 2, name="envs", env_vars={"MINE": "x"}).environ().wait()
        assert not [name for name in SECTION_4 if name not in second]
        assert (second["GROUP_NAME"], second["WORKER_NAME"]) == ("envs", "envs:1")
        assert (second["RANK"], second["WORLD_SIZE"], second["NODE_RANK"]) == ("1", "2", "0")
        assert second["MASTER_ADDR"] == first["MASTER_ADDR"] == "127.0.0.1"
        assert second["MASTER_PORT"] == first["MASTER_PORT"]
        assert int(first["MASTER_PORT"]) > 0
        assert second["CLUSTER_NAMESPACE"] == cluster.namespace
        assert second["MINE"] == "x"

    def test_environment_too_large_for_a_message_is_refused_and_the_name_stays_free(self, cluster):
        with pytest.raises(UsageError, match=r"a Launch of 1.* bytes is not sent: .* pass large data as arguments"):
            lw.Greeter.create_group().launch(cluster, name="long", env_vars={"BIG": "x" * (15 << 20)})
        lw.Greeter.create_group().launch(cluster, name="long").greet().wait()

    def test_environment_of_the_driver_is_not_sent_to_workers(self, monkeypatch, cluster):
        monkeypatch.setenv("ONLY_OF_THE_DRIVER", "1")
        assert "ONLY_OF_THE_DRIVER" not in lw.Greeter.create_group().launch(cluster).environ().wait()[0]


class TestPorts:
    def test_port_that_a_worker_holds_is_given_to_no_other(self, cluster):
        group = lw.many(cluster, lw.Greeter, 2)
        master = int(group.environ().wait()[0]["MASTER_PORT"])
        held = group.ports(20).wait()
        ephemeral = group.ephemeral_ports(100).wait()
        ours = {master, *held[0], *held[1]}
        assert len(ours) == 41
        assert not ours & {*ephemeral[0], *ephemeral[1]}

    def test_port_that_a_worker_releases_can_be_bound(self, cluster):
        group = lw.Greeter.create_group().launch(cluster)
        ((port,),) = group.ports(1).wait()
        assert group.can_bind(port).wait() == [False]
        group.release(port).wait()
        assert group.can_bind(port).wait() == [True]
        with pytest.raises(UsageError, match=f"port {port} is not held here"):
            group.release(port).wait()

    @pytest.mark.torch
    def test_init_process_group_works_without_settings(self, cluster):
        group = lw.many(cluster, lw.Reducer, 2, preload=["torch"])  # once, not in each worker
        assert group.all_reduce().wait() == [3.0, 3.0]

    @pytest.mark.torch
    def test_tensors_arrive_as_arguments_and_results(self, cluster):
        import torch

        group = lw.Greeter.create_group().launch(cluster, preload=["torch"])
        tensor = torch.arange(100_000, dtype=torch.bfloat16).reshape(100, -1)
        back = group.echo({"t": tensor, "p": torch.nn.Parameter(torch.ones(3))}).wait()[0]
        assert torch.equal(back["t"], tensor)
        assert isinstance(back["p"], torch.nn.Parameter)


class TestStreams:
    async def test_stream_yields_items_of_all_ranks(self, cluster):
        group = await lw.many(cluster, lw.Looped, 2)
        got = [pair async for pair in group.numbers(100)]
        for rank in range(2):
            assert [item for who, item in got if who == rank] == list(range(100))

    async def test_a_worker_is_never_more_than_the_window_ahead(self, cluster):
        group = await lw.Looped.create_group().launch(cluster)
        stream = group.numbers(10**6)
        items = stream.__aiter__()
        for taken in range(1, 60):
            await items.__anext__()
            assert (await group.made_so_far())[0] <= taken + WINDOW + 1
        await items.aclose()  # does not wait for the generator's end
        assert await group.was_cancelled() == [True]
        made = (await group.made_so_far())[0]
        assert made <= taken + WINDOW + 1
        assert await group.plain() == [True]
        assert (await group.made_so_far())[0] == made

    def test_blocking_iteration_yields_large_items(self, cluster):
        group = lw.Looped.create_group().launch(cluster)
        for n, (rank, array) in enumerate(group.arrays(40)):
            assert (rank, array[0], array.shape) == (0, n, (50_000,))
            array[:] = 0

    async def test_error_ends_the_stream(self, cluster):
        group = await lw.Looped.create_group().launch(cluster)
        items = group.dries_up().__aiter__()
        assert await items.__anext__() == (0, 1)
        with pytest.raises(ValueError, match="dry"):
            await items.__anext__()
        assert await group.plain() == [True]


class TestEnds:
    async def test_timeout_ends_the_wait_and_the_coroutine(self, cluster):
        group = await lw.Looped.create_group().launch(cluster)
        result = group.with_timeout(60).forever()
        assert await group.plain() == [True]  # it has begun: one whose time is over before that is never run

        def time_is_over() -> None:
            result._timer.cancel()
            result._expire()

        cluster.runtime.io.call(time_is_over)
        with pytest.raises(CallTimeoutError, match=r"forever\(\) had 60 s"):
            await result
        assert await group.was_cancelled() == [True]

    def test_queued_calls_can_be_cancelled(self, cluster, tmp_path):
        """That they are never run is shown with the executor: here the news races with the turn."""
        group = lw.Greeter.create_group().launch(cluster)
        os.mkfifo(tmp_path / "go")
        held = group.wait_for_fifo(str(tmp_path / "go"))
        with pytest.raises(TimeoutError):
            group.with_timeout(0.05).greet().wait()
        cancelled = group.greet()
        assert cancelled.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            cancelled.wait()
        (tmp_path / "go").write_bytes(b"")
        assert held.wait() == [None]
        assert group.greet().wait() == ["hello you from 0"]

    async def test_cancel_interrupts_a_running_coroutine(self, cluster):
        group = await lw.Looped.create_group().launch(cluster)
        result = group.forever()
        assert await group.plain() == [True]
        assert result.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            await result
        assert await group.was_cancelled() == [True]

    async def test_cancelled_task_does_not_cancel_its_call(self, cluster):
        group = await lw.Looped.create_group().launch(cluster)
        result = group.wait_for_gate()
        task = asyncio.ensure_future(result.async_wait())
        await group.plain()
        task.cancel()
        await asyncio.wait([task])
        await group.open_gate()
        assert await result == ["through"]

    def test_timers_of_workers_reach_the_caller(self, cluster):
        group = lw.many(cluster, lw.Greeter, 2)
        result = group.timed()
        reduced, per_rank = result.consume_durations("sum", return_per_rank=True)
        assert set(reduced) == {"timed", "inner"}
        assert [set(times) for times in per_rank] == [{"timed", "inner"}] * 2
        assert result.consume_duration("min") >= 0
        assert set(group.timed().consume_durations()) == {"timed", "inner"}

    def test_a_consumed_duration_is_not_counted_again(self, cluster):
        group = lw.many(cluster, lw.Greeter, 2, name="timers")
        assert 0 <= group.timed_by_decorator().consume_duration("sum") < 1
        assert set(group.timed().consume_durations()) == {"timed", "inner"}
        assert lw.Greeter.check_worker_alive("timers:1")  # a driver asks too
        assert not lw.Greeter.check_worker_alive("timers:2")
        assert len(group._workers) == 2


class TestChildren:
    def test_a_forked_child_is_a_member(self, cluster):
        group = lw.Parent.create_group().launch(cluster, name="family")
        assert group.fork_child().wait() == ["family:0:2 of 4"]
