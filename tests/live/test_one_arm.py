"""Two jobs name one arm in two ways: one of them gets it."""

from __future__ import annotations

import json
import subprocess
import sys

import arm_hardware as ah
import live_workers as lw
import pace
import pytest

from rlinf_actors import HardwareInUseError
from rlinf_actors.testing import LocalCluster, simulated_arm_hardware

pytestmark = pytest.mark.live

HOLDER = """
    import json, sys
    import arm_hardware as ah
    from rlinf_actors.testing import simulated_arm_hardware
    from rlinf_actors import Cluster
    kind, head, *entries = map(json.loads, sys.argv[1:])
    with Cluster(cluster_cfg=ah.owning(kind, *entries), head=head, namespace="theirs") as cluster:
        with ah.Mover.create_group().launch(cluster, ah.on(0), name="taken").wait_ready():
            print("has it", flush=True)
            sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def local():
    env = {"RLINF_EXT_MODULE": "arm_hardware", "PYTHONPATH": f"{lw.ROOT / 'tests/live'}"}
    with LocalCluster(env=env) as made:
        yield made


@pytest.fixture
def holder(local, tmp_path):
    """Start another job, whose group has the first of some arms."""
    started = []

    def start(kind, *entries):
        path = tmp_path / "holder.py"
        path.write_text(f"import sys\nsys.path.insert(0, {str(lw.ROOT / 'tests/live')!r})\n" + lw.dedent(HOLDER))
        process = subprocess.Popen(
            [sys.executable, path, *map(json.dumps, (kind, local.head, *entries))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**lw.SCRIPT_ENV, **local.driver_env},
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "has it\n"

    yield start
    for process in started:
        process.communicate(timeout=pace.PATIENCE_S)


UNCHECKED = {"disable_validate": True}


@pytest.mark.parametrize(
    ("kind", "theirs", "mine", "arm", "said"),
    [
        (
            "GimArm",
            [{"can_interface": "can0", **UNCHECKED}],
            [{"can_interface": "can1", **UNCHECKED}, {"can_interface": "can0", **UNCHECKED}],
            1,
            "GimArm can0 of node 0 is held by group 'taken' of job 'theirs', owned by",
        ),
        (
            "Franka",
            [{"robot_ip": "127.0.0.1", **UNCHECKED}],
            [{"robot_ip": "localhost", **UNCHECKED}],
            0,
            "Franka localhost is held by group 'taken' of job 'theirs' as Franka 127.0.0.1, owned by",
        ),
        (
            "DualFranka",
            [{"left_robot_ip": "10.9.0.1", "right_robot_ip": "10.9.0.2", **UNCHECKED}],
            [{"left_robot_ip": "10.9.0.3", "right_robot_ip": "::ffff:10.9.0.1", **UNCHECKED}],
            0,
            "is held by group 'taken' of job 'theirs' as DualFranka 10.9.0.1+10.9.0.2, owned by",
        ),
        (
            simulated_arm_hardware.HW_TYPE,
            [{"address": "127.0.0.1:1000"}],
            [{"address": "127.0.0.1:999"}, {"address": "localhost:1000"}],
            1,
            "SimulatedArm localhost:1000 is held by group 'taken' of job 'theirs' as SimulatedArm 127.0.0.1:1000, ",
        ),
        (
            "BareArm",
            [{"address": "one"}],
            [{"address": "two"}],
            0,
            "BareArm of node 0 is held by group 'taken' of job 'theirs', owned by",
        ),
    ],
)
def test_second_job_does_not_get_the_arm_by_another_name(local, holder, kind, theirs, mine, arm, said):
    holder(kind, *theirs)
    with local.cluster(cluster_cfg=ah.owning(kind, *mine), namespace="mine") as cluster:
        with pytest.raises(HardwareInUseError) as refused:
            ah.Mover.create_group().launch(cluster, ah.on(arm), name="second").wait_ready()
        assert said in str(refused.value)
        for other in range(len(mine) - 1):
            ah.Mover.create_group().launch(cluster, ah.on(other), name="other").wait_ready().shutdown()


def test_launch_says_that_a_node_counts_as_one_of_a_type_without_identity(local, caplog):
    with local.cluster(cluster_cfg=ah.owning("BareArm", {"address": "one"}, {"address": "two"})) as cluster:
        ah.Mover.create_group().launch(cluster, ah.on(0, 1)).wait_ready().shutdown()
    said = [record.message for record in caplog.records if "add-hardware" in record.message]
    assert said == [
        "type BareArm does not say which robot is which, so all of a node count as one, which one group has at a time. "
        "To tell them apart, set `identities` in enumerate() (docs/how-to/add-hardware.md)"
    ]
