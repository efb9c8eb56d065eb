"""From placements and options to worker specs, and the readiness of a group."""

from __future__ import annotations

import asyncio
import collections
import os
import subprocess
import sys
import types

import group_kit
import pytest
from blocking import no_blocking

from rlinf_actors.cluster.service import import_paths
from rlinf_actors.errors import CallTimeoutError, ClusterTimeoutError, ConfigError, UsageError, WorkerStartError
from rlinf_actors.group import launcher
from rlinf_actors.group.group_spec import class_reference, worker_specs
from rlinf_actors.group.launcher import check_arguments
from rlinf_actors.hardware import registry
from rlinf_actors.model.hardware import HardwareInfo, HardwareResource
from rlinf_actors.model.node import NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy
from rlinf_actors.settings import for_workers
from rlinf_actors.wire.values import Claim, Identity, WorkerSpec


def template(env=None, **more):
    return WorkerSpec("", "g", "ns", -1, 0, -1, env or {}, **more)


def specs(shared=None, defaults=None):
    cluster = DescribedCluster.identical(2, 2, model="A800")
    placements = PackedPlacementStrategy(0, 3).get_placement(cluster)
    return worker_specs(shared or template(), placements, cluster, defaults or {})


class TestSpecs:
    def test_each_placement_gives_one_spec_in_rank_order(self):
        made = specs()
        assert [(spec.rank, spec.node_rank, spec.world_size) for spec in made] == [
            (0, 0, 4), (1, 0, 4), (2, 1, 4), (3, 1, 4),
        ]  # fmt: skip
        assert {spec.group for spec in made} == {"g"}
        assert made[3].env["RANK"] == "3"
        assert made[3].env["CUDA_VISIBLE_DEVICES"] == "1"

    def test_ids_are_never_used_again(self):
        ids = [spec.id for spec in specs() + specs()]
        assert max(collections.Counter(ids).values()) == 1

    def test_variables_of_the_group_override_all_others(self):
        made = specs(template({"RANK": "7", "MINE": "x"}))
        assert (made[0].env["RANK"], made[0].env["MINE"]) == ("7", "x")

    def test_workers_use_the_drivers_log_level_unless_the_group_has_one(self):
        driver = for_workers({"RLINF_LOG_LEVEL": "DEBUG", "LOGLEVEL": "verbose"})
        assert specs(defaults=driver)[0].env["RLINF_LOG_LEVEL"] == "DEBUG"
        assert "LOGLEVEL" not in specs(defaults=driver)[0].env
        own = template({"RLINF_LOG_LEVEL": "error"})
        assert specs(own, driver)[0].env["RLINF_LOG_LEVEL"] == "error"

    def test_unknown_log_level_is_refused_before_the_launch(self):
        with pytest.raises(ConfigError, match=r"RLINF_LOG_LEVEL: is 'verbose'; it must be one of DEBUG, INFO"):
            specs(defaults={"RLINF_LOG_LEVEL": "verbose"})

    def test_specs_carry_the_launch_options(self):
        shared = template(
            start_method="spawn", preload=("numpy",), sys_path=("/p",), cwd="/c", path_env_merge_mode="override",
            log_dir="/logs", forward_logs=False,
        )  # fmt: skip
        spec = specs(shared)[0]
        assert (spec.start_method, spec.preload, spec.sys_path, spec.cwd) == ("spawn", ("numpy",), ("/p",), "/c")
        assert (spec.path_env_merge_mode, spec.log_dir, spec.forward_logs) == ("override", "/logs", False)


def arms(*infos):
    """The claims of workers that have one arm each, on a node with these arms."""
    node = NodeInfo(["lab"], 3, ray_id="node-x", hardware_resources=[HardwareResource("SpecArm", list(infos))])
    lab = NodeGroupInfo("lab", [node], hardware_type="SpecArm")
    nodes = {3: node, 4: NodeInfo([], 4, ray_id="node-y")}
    cluster = types.SimpleNamespace(
        get_node_group=lambda label: lab, get_node_info=nodes.__getitem__, num_nodes=1, num_accelerators=0
    )
    places = [Placement(rank, 3, 0, local_hardware_ranks=[rank], node_group_label="lab") for rank in range(len(infos))]
    return [spec.claims for spec in worker_specs(template(), places, cluster)]


class NamedArm(HardwareInfo):
    identity = "10.1.1.1"


def known(cls, *identities):
    arm = cls("SpecArm", "v1")
    arm.identities = identities
    return arm


class TestClaims:
    def test_claim_names_an_arm_by_its_identity(self):
        assert arms(NamedArm("SpecArm", "v1"), known(NamedArm, Identity("SN 7"))) == [
            (Claim("SpecArm:10.1.1.1", "SpecArm 10.1.1.1"),),
            (Claim("SN 7", "SpecArm 10.1.1.1"),),
        ]

    def test_claim_of_an_arm_of_a_node_has_no_place_in_a_list(self):
        can0, can1 = (known(HardwareInfo, Identity(name, 3)) for name in ("can0", "can1"))
        assert arms(can1, can0) == [*arms(can1), *arms(can0)]
        assert arms(can0) == [(Claim("node-x:can0", "SpecArm can0 of node 3"),)]

    def test_claim_of_an_arm_that_another_node_drives_is_of_that_node(self):
        assert arms(known(NamedArm, Identity("can0", 4))) == [(Claim("node-y:can0", "SpecArm 10.1.1.1"),)]

    def test_arm_with_two_identities_is_claimed_by_both(self):
        both = arms(known(HardwareInfo, Identity("10.0.0.1"), Identity("fd00::1")))
        assert [claim.key for claim in both[0]] == ["10.0.0.1", "fd00::1"]

    def test_node_counts_as_one_of_the_arms_without_identity(self):
        arm = HardwareInfo("SpecArm", "v1")
        assert arms(arm, arm) == [(Claim("node-x:SpecArm", "SpecArm of node 3"),)] * 2

    def test_types_that_may_be_shared_are_not_claimed(self, monkeypatch):
        monkeypatch.setattr(registry, "_hardware", {})

        @registry.Hardware.register()
        class SpecArm(registry.Hardware):
            HW_TYPE = "SpecArm"
            EXCLUSIVE = False

            @classmethod
            def enumerate(cls, node_rank, configs=None):
                return None

        assert arms(NamedArm("SpecArm", "v1")) == [()]

    def test_accelerators_are_not_claimed(self):
        assert [spec.claims for spec in specs()] == [(), (), (), ()]


class TestClassReference:
    def test_importable_class_is_sent_by_name(self):
        assert class_reference(collections.OrderedDict) == "collections:OrderedDict"
        assert class_reference(group_kit.Arm) == "group_kit:Arm"

    def test_class_that_cannot_be_imported_is_sent_by_value(self):
        class Local: ...

        assert class_reference(Local) == ""
        assert class_reference(type("Main", (), {"__module__": "__main__"})) == ""
        hidden = type("Arm", (), {"__module__": "group_kit"})
        assert class_reference(hidden) == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (launcher.LaunchOptions(start_method="teleport"), "start_method is 'teleport'; it must be one of fork, spawn"),
        (launcher.LaunchOptions(max_concurrency=0), "max_concurrency is 0; it must be at least 1"),
        (launcher.LaunchOptions(name="a/b"), "'a/b' cannot be a group's name"),
        (launcher.LaunchOptions(name="a b"), "'a b' cannot be a group's name: a name has 1 to 128 letters"),
        (launcher.LaunchOptions(name="a\nb"), r"'a\\nb' cannot be a group's name"),
        (launcher.LaunchOptions(name="\x1b]0;b"), r"'\\x1b\]0;b' cannot be a group's name"),
        (launcher.LaunchOptions(env={"A=B": "1"}), "'A=B' cannot be the name of an environment variable"),
        (launcher.LaunchOptions(env={"A": "\0"}), "A holds a NUL byte"),
        (launcher.LaunchOptions(name="a:b"), "'a:b' cannot be a group's name"),
    ],
)
def test_invalid_options_are_refused_before_the_launch(options, said):
    with pytest.raises(UsageError, match=said):
        launcher.launch(group_kit.Arm, (), {}, types.SimpleNamespace(), options)


def test_import_paths_are_those_of_the_script_without_the_interpreters(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(os.getcwd())!r})\n"
        "from rlinf_actors.cluster.service import import_paths\n"
        "print('\\n'.join(import_paths()))\n"
    )
    (tmp_path / "lib").mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True, env=env, cwd="/"
    )
    paths = done.stdout.split()
    assert str(tmp_path) in paths
    assert str(tmp_path / "lib") in paths
    assert not [path for path in paths if "site-packages" in path or path.endswith(".zip")]


async def test_import_paths_do_not_touch_the_file_system_on_an_event_loop(tmp_path, monkeypatch):
    """A path that was not resolved before is taken as written; a thread resolves it for later launches."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "link").symlink_to("lib")
    await asyncio.to_thread(import_paths)
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    with no_blocking():
        assert import_paths()[0] == str(tmp_path / "link")
    assert (await asyncio.to_thread(import_paths))[0] == str(tmp_path / "lib")
    with no_blocking():
        assert import_paths()[0] == str(tmp_path / "lib")


class TestReadiness:
    """`await group`, its `with` blocks, and failed starts."""

    async def test_await_returns_the_group(self, world):
        assert await world.group is world.group
        assert await asyncio.to_thread(world.group.wait_ready, 10) is world.group

    async def test_end_of_the_block_shuts_the_group_down(self, world):
        async with world.group as group:
            assert group is world.group
        assert world.stopped == [5.0]

    async def test_failed_start_is_raised_by_await_and_by_both_blocks(self):
        world = group_kit.World()
        failed = type(world.remote.ready)("x")
        failed.reject(WorkerStartError("no interpreter"))
        world.remote.ready = failed
        for _ in range(2):
            with pytest.raises(WorkerStartError):
                await world.group
        with pytest.raises(WorkerStartError):
            world.group.wait_ready()
        with pytest.raises(WorkerStartError):
            async with world.group:
                pass
        with pytest.raises(WorkerStartError), world.group:
            pass

    async def test_a_slow_start_can_be_waited_for_again(self):
        world = group_kit.World()
        world.remote.ready = type(world.remote.ready)("group 'arms'")
        with pytest.raises(CallTimeoutError, match="group 'arms' was not done within"):
            world.group.wait_ready(0.01)
        world.remote.ready.resolve(None)
        assert world.group.wait_ready() is world.group

    async def test_a_cancelled_block_ends_the_group(self):
        world = group_kit.World()
        world.remote.ready = type(world.remote.ready)("group 'arms'")

        async def use():
            async with world.group:
                raise AssertionError("it was never ready")

        task = asyncio.create_task(use())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert world.stopped == [5.0]

    async def test_close_method_of_the_worker_runs_before_the_shutdown(self):
        class Closes(group_kit.Arm):
            def _close(self): ...

        world = group_kit.World(2, Closes)
        ending = asyncio.ensure_future(world.control.shutdown_async(3.0))
        for rank in world.ranks:
            call = await rank.call()
            assert (call.method, call.deadline_s) == ("_close", 3.0)
            assert world.stopped == []
            rank.ok(call.id)
        await ending
        assert world.stopped == [3.0]

    async def test_cancelled_wait_for_a_shutdown_does_not_stop_the_shutdown(self):
        class Closes(group_kit.Arm):
            def _close(self): ...

        world = group_kit.World(1, Closes)
        ending = asyncio.ensure_future(world.control.shutdown_async())
        call = await world.ranks[0].call()
        ending.cancel()
        await asyncio.wait([ending])
        world.ranks[0].ok(call.id)
        await world.control.shutdown_async()
        assert world.stopped == [5.0]

    async def test_close_method_that_fails_does_not_stop_the_shutdown(self, caplog):
        class Closes(group_kit.Arm):
            def _close(self): ...

        world = group_kit.World(1, Closes)
        ending = asyncio.ensure_future(world.control.shutdown_async())
        call = await world.ranks[0].call()
        world.ranks[0].raises(call.id, RuntimeError("stuck arm"))
        await ending
        assert world.stopped == [5.0]
        assert "_close() failed; stopping it anyway" in caplog.text

    async def test_shutdown_that_failed_can_be_repeated(self):
        class Closes(group_kit.Arm):
            def _close(self): ...

        world = group_kit.World(1, Closes)
        world.stop_error = ClusterTimeoutError("the head does not answer")
        ending = asyncio.ensure_future(world.control.shutdown_async())
        world.ranks[0].ok((await world.ranks[0].call()).id)
        with pytest.raises(ClusterTimeoutError):
            await ending
        with pytest.raises(ClusterTimeoutError):
            await world.control.shutdown_async(1.0)
        world.stop_error = None
        for _ in range(2):
            await world.control.shutdown_async(2.0)
        assert world.stopped == [5.0, 1.0, 2.0]
        assert [call.method for call in world.ranks[0].calls] == ["_close"], "the worker has closed itself already"

    @pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
    async def test_an_interrupted_entry_ends_the_group(self, error, monkeypatch):
        world = group_kit.World(1)

        def interrupted(timeout=None):
            raise error  # as a signal handler does while the main thread blocks

        monkeypatch.setattr(world.remote.ready, "wait", interrupted)

        def use():
            with world.group:
                raise AssertionError("it was never entered")

        with pytest.raises(error):
            await asyncio.to_thread(use)
        assert world.stopped == [5.0]


class TestArguments:
    """Wrong arguments of launch(): the error says what to write."""

    CLUSTER = types.SimpleNamespace(runtime=None)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                (NodePlacementStrategy([0]), None, None),
                r"launch\(cluster, placement_strategy=NodePlacementStrategy\(...\)\)",
            ),
            (("127.0.0.1:6380", None, None), r"'127.0.0.1:6380' in the place of the cluster: write launch\(cluster\)"),
            ((CLUSTER, [0, 1], None), r"placement_strategy is \[0, 1\]; it must be a PlacementStrategy, such as"),
            ((CLUSTER, None, 3), r"restart is 3; .* write restart=RestartPolicy.on_failure\(max_restarts=3\)"),
            ((CLUSTER, None, 0), r"write restart=RestartPolicy.never\(\)"),
            ((CLUSTER, None, "always"), r"restart is 'always'; .* write restart=RestartPolicy.on_failure\(\)"),
        ],
    )
    def test_arguments_of_wrong_types_are_refused(self, arguments, said):
        with pytest.raises(UsageError, match=said):
            check_arguments(*arguments)


@pytest.mark.parametrize("owned", [True, False])
def test_ctrl_c_ends_only_the_detached_group_that_is_being_launched(owned):
    def interrupt():
        raise KeyboardInterrupt

    withdrawn = []
    runtime = types.SimpleNamespace(groups=types.SimpleNamespace(withdraw=withdrawn.append))
    waiting = types.SimpleNamespace(wait=interrupt)
    group = types.SimpleNamespace(request_ready=lambda: waiting, owned=owned)
    with pytest.raises(KeyboardInterrupt):
        launcher._wait_until_up(runtime, group)
    assert withdrawn == ([group] if owned else [])
