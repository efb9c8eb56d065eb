"""The cluster and groups of a driver."""

from __future__ import annotations

import live_workers as lw
import pytest

from rlinf_actors import (
    Cluster,
    ConfigError,
    GroupClosedError,
    GroupNotFoundError,
    NameInUseError,
    PlacementError,
    UsageError,
    WorkerAddress,
    WorkerGroup,
)

pytestmark = pytest.mark.live


class TestCluster:
    def test_cluster_shows_its_facts(self, cluster):
        assert cluster.num_nodes == 1
        node = cluster.get_node_info(0)
        assert node.node_rank == 0
        assert node.num_cpus >= 1
        assert cluster.accelerator_ranks == [list(range(node.num_accelerators))]
        assert cluster.num_accelerators == node.num_accelerators
        assert cluster.get_node_ip(0) == "127.0.0.1"
        assert [alive.node_rank for alive in cluster.get_alive_nodes()] == [0]
        assert cluster.get_node_group().label == "cluster"
        assert cluster.get_node_group("nothing") is None
        assert 1023 < cluster.find_free_port(30_000) < 30_000
        assert Cluster.has_initialized()
        with pytest.raises(PlacementError, match="node 1 is not in this cluster"):
            cluster.get_node_info(1)

    def test_process_has_one_cluster(self, cluster):
        assert Cluster() is cluster
        assert Cluster(num_nodes=1) is cluster
        with pytest.raises(ConfigError, match="num_nodes=2 was asked for"):
            Cluster(num_nodes=2)
        assert Cluster() is cluster


class TestGroups:
    def test_workers_have_ranks_and_names(self, cluster):
        group = lw.many(cluster, lw.Greeter, 3, "hey", name="trio")
        assert group.greet().wait() == [f"hey you from {rank}" for rank in range(3)]
        assert group.worker_group_name == "trio"
        assert group.world_size == 3
        assert [placement.rank for placement in group.placements] == [0, 1, 2]
        assert group.worker_info_list[1].worker.greet().wait() == ["hey you from 1"]
        assert group.worker_info_list[2].info.address == WorkerAddress("trio", 2)

    def test_calls_before_it_is_ready_queue(self, cluster):
        group = lw.Greeter.create_group().launch(cluster)
        results = [group.greet(str(n)) for n in range(20)]
        assert [result.wait()[0] for result in results] == [f"hello {n} from 0" for n in range(20)]

    def test_default_name_of_a_group_is_its_class(self, cluster):
        assert lw.Greeter.create_group().launch(cluster).worker_group_name == "worker_group_Greeter"

    def test_name_in_use_is_refused(self, cluster):
        first = lw.Greeter.create_group().launch(cluster, name="taken")
        with pytest.raises(ValueError, match="taken"):
            lw.Greeter.create_group().launch(cluster, name="taken")
        assert first.greet().wait()
        first.shutdown()
        again = lw.Greeter.create_group("again").launch(cluster, name="taken")
        assert again.greet().wait() == ["again you from 0"]

    async def test_a_name_in_use_in_asyncio_is_raised_by_await_and_calls(self, cluster):
        first = lw.Greeter.create_group().launch(cluster, name="taken2")
        second = lw.Greeter.create_group().launch(cluster, name="taken2")
        call = second.greet()
        with pytest.raises(ValueError, match="taken2"):
            await second
        with pytest.raises(NameInUseError):
            await call
        with pytest.raises(NameInUseError):
            await second.greet()
        assert await first.greet() == ["hello you from 0"]

    def test_shutdown_runs_close_and_frees_the_name(self, cluster, tmp_path):
        mark = tmp_path / "closed"
        with lw.Closes.create_group(str(mark)).launch(cluster, name="closing") as group:
            assert group.ready().wait() == [True]
            assert not mark.exists()
        assert mark.read_text() == "closed"
        with pytest.raises(GroupClosedError):
            group.ready().wait()
        group.shutdown()
        group._close()
        with pytest.raises(GroupNotFoundError):
            WorkerGroup.from_group_name(lw.Closes, "closing")

    async def test_async_block_shuts_the_group_down(self, cluster, tmp_path):
        mark = tmp_path / "closed"
        async with lw.Closes.create_group(str(mark)).launch(cluster, name="closing2") as group:
            pid = (await group.get_name(), group.worker_info_list[0].info.address.get_name())
            assert pid == (["closing2:0"], "closing2:0")
        assert mark.exists()

    def test_workers_are_gone_when_shutdown_returns(self, cluster):
        group = lw.many(cluster, lw.Where, 2)
        pids = [pid for _, pid in group.where().wait()]
        child = group.execute_on(0).leave_child().wait()[0]
        stuck = group.block()
        group.shutdown(grace=0.1)
        assert not [pid for pid in (*pids, child) if lw.running(pid)]
        with pytest.raises(GroupClosedError):
            stuck.wait()

    def test_allocate_places_workers(self, cluster):
        group = cluster.allocate(lw.Greeter, "single", cls_args=("yo",), env_vars={"MINE": "1"})
        assert group.greet().wait() == ["yo you from 0"]
        assert group.environ().wait()[0]["MINE"] == "1"

    def test_group_can_be_found_by_name_in_the_same_process(self, cluster):
        lw.Greeter.create_group("att").launch(cluster, name="attached").wait_ready()
        assert WorkerGroup.from_group_name(lw.Greeter, "attached").greet().wait() == ["att you from 0"]
        with pytest.raises(GroupNotFoundError, match="nobody"):
            WorkerGroup.from_group_name(lw.Greeter, "nobody")

    def test_clashing_method_is_refused_at_create_group(self):
        class Clashes(lw.Greeter):
            def execute_on(self): ...

        with pytest.raises(UsageError, match=r"Clashes\.execute_on"):
            Clashes.create_group()

    def test_large_and_unusual_values_are_returned_unchanged(self, cluster):
        np = pytest.importorskip("numpy")
        group = lw.many(cluster, lw.Greeter, 2)
        array = np.arange(3_000_000, dtype=np.float64)
        for back in group.echo(array).wait():
            np.testing.assert_array_equal(back, array)
            back[0] = -1
        value = {"a": (1, [b"x" * 100_000]), "f": lambda x: x + 1}
        back = group.execute_on(0).echo(value).wait()[0]
        assert back["a"] == value["a"]
        assert back["f"](1) == 2
        assert group.execute_on(1).echo(None).wait() == [None]

    def test_local_class_is_sent_by_value(self, cluster):
        offset = 5

        class Local(lw.Greeter):
            def shifted(self, x):
                return super().echo(x) + offset

        assert Local.create_group().launch(cluster, name="local").shifted(1).wait() == [6]
