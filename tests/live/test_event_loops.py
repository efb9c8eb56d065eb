"""Nothing that is called in a running event loop blocks it, with the head stopped by SIGSTOP and blockbuster on.

The loops that are watched are the caller's and the runtime's own. tests/loop_rows.py has a row for every public name.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Iterator

import live_workers as lw
import loop_rows
import pace
import pytest
from blocking import no_blocking
from loop_workers import Looped, Plain, Pulse, begin, end

from rlinf_actors import AsyncWork, Channel, Cluster, ComponentPlacement, NodePlacementStrategy, RestartPolicy
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

HARDWARE = {"accelerators": 1, "model": "A800"}
LATE = loop_rows.WAITS | loop_rows.MAY_WAIT
ON_FAILURE = RestartPolicy.on_failure()
CONFIG = {"num_nodes": 2, "component_placement": {"actor": "0-1"}}


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(2, HARDWARE) as local:
        yield local


@pytest.fixture
async def pulse() -> AsyncIterator[Pulse]:
    pulse = Pulse()
    yield pulse
    if Cluster.has_initialized():  # the test failed
        await Cluster.current().shutdown(async_op=True)
    await pulse.stop()


async def test_no_call_of_a_driver_blocks(local, pulse):
    """Connecting, every row, and the end: each while the head stands still."""
    with no_blocking():
        connecting = local.connect()
        with lw.stopped(local.nodes[0].pid):  # the head, and the agentd of node 0
            opening = asyncio.ensure_future(connecting.__aenter__())
            await pulse.next()
            assert not opening.done()
        cluster = await asyncio.wait_for(opening, pace.PATIENCE_S)
        places = NodePlacementStrategy([0, 1])
        group = await Plain.create_group().launch(cluster, places, name="group", restart=ON_FAILURE)
        groups = [await Plain.create_group().launch(cluster, places, name=f"group-{n}") for n in range(4)]
        await group.execute_on(0).launch_far()
        result = group.add(1)
        await result
        scene = types.SimpleNamespace(
            local=local, cluster=cluster, cls=Plain, group=group, groups=groups, result=result, connecting=connecting,
            channel=await Channel.connect("theirs", async_op=True), ended=await Channel.connect("ended", async_op=True),
            placement=ComponentPlacement(CONFIG, cluster), work=lambda: AsyncWork.on_thread(int, "a row"),
        )  # fmt: skip
        with lw.stopped(local.nodes[0].pid):  # the head, and the agentd of node 0
            under_way = await begin(loop_rows.ROWS, scene)
            await end({name: one for name, one in under_way.items() if name not in LATE}, pace.PATIENCE_S)
            await pulse.next()
            waiting = {name for name, one in under_way.items() if not one.done()}
            assert waiting - loop_rows.MAY_WAIT == loop_rows.WAITS & loop_rows.ROWS.keys()
        came = await end(under_way, pace.PATIENCE_S)
        assert [node.node_rank for node in came["Cluster.get_alive_nodes"]] == [0, 1]
        assert await came["WorkerGroup.from_group_name"].add(2) == [2]
        with lw.stopped(local.nodes[0].pid):  # the head, and the agentd of node 0
            ending = await begin(loop_rows.ENDS, scene)
            await pulse.next()
            await end(ending, pace.PATIENCE_S)


@pytest.mark.parametrize("tensors", [False, pytest.param(True, marks=pytest.mark.torch)])
async def test_no_call_of_an_async_worker_blocks(local, tensors):
    async with local.connect() as cluster:
        places = NodePlacementStrategy([0, 1])
        maker = await Plain.create_group().launch(cluster, places, name="maker")
        await maker.execute_on(0).launch_far()
        far = await Plain.create_group().launch(cluster, places, name="argument")
        group = await Looped.create_group(far, tensors).launch(cluster, places, name="looped")
        with lw.stopped(local.nodes[0].pid):  # the head, and the agentd of node 0
            waiting = await group.execute_on(0).begin(pace.PATIENCE_S)
            rows = loop_rows.TENSORS if tensors else loop_rows.WORKER
            assert loop_rows.WAITS & rows.keys() <= set(waiting[0])
        other = group.execute_on(1).other_end()
        await group.execute_on(0).finish(pace.PATIENCE_S)
        await other


async def test_no_call_of_a_local_cluster_blocks(pulse):
    scene = types.SimpleNamespace(local=LocalCluster(2), other=LocalCluster(1))
    try:
        with no_blocking():
            for name, row in loop_rows.LOCAL.items():
                before = pulse.beats
                await end(await begin({name: row}, scene), pace.PATIENCE_S)
                assert pulse.beats > before or name == "LocalCluster.driver_env"
                if name == "LocalCluster.connect":
                    await Cluster.current().shutdown(async_op=True)
    finally:
        await asyncio.gather(scene.local.stop(async_op=True), scene.other.stop(async_op=True))


async def test_start_and_end_of_a_private_cluster_do_not_block_the_loop(pulse):
    with no_blocking():
        before = pulse.beats
        async with Cluster.connect(num_nodes=1) as cluster:
            assert pulse.beats > before
            async with Plain.create_group().launch(cluster, name="private") as group:
                assert await group.add(bytes(1 << 20)) == [bytes(1 << 20)]
            before = pulse.beats
        assert pulse.beats > before
