"""One job on Python 3.10, 3.11, 3.12 and 3.13, with numpy 1, numpy 2 and none: what crosses, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import arm_hardware as ah
import environments
import mixed_workers as mw
import numpy
import pytest

from rlinf_actors import (
    Channel,
    NodePlacementStrategy,
    SerializationError,
    Worker,
    WorkerError,
    WorkerStartError,
)
from rlinf_actors.testing import LocalCluster, local_cluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]  # pip downloads in it

HERE = Path(__file__).parent
OTHERS = (10, 12, 13)
RUNTIME = [f"{name}=={version(name)}" for name in environments.RUNTIME]
AGENTD = ["psutil", "nvidia-ml-py", "PyYAML", *environments.RUNTIME_310]
"""What agentd needs beside what workers need; on Python 3.10."""
PACKAGES = {10: ["numpy==1.26.4", *AGENTD], 12: [f"numpy=={numpy.__version__}"], 13: []}
ARROWS = [(10, 11), (11, 10), (10, 12), (12, 10), (12, 11), (10, 13), (13, 12)]


def has_numpy(*minors):
    return 13 not in minors


@pytest.fixture(scope="session")
def pythons(tmp_path_factory):
    """The interpreters by minor version: with numpy 1 on 3.10, with ours on 3.12, with none on 3.13."""
    found = {minor: environments.interpreter(minor) for minor in OTHERS if minor != sys.version_info[1]}
    missing = [f"3.{minor}" for minor, path in found.items() if path is None]
    if missing:
        pytest.skip(f"this machine has no Python {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("pythons")
    with ThreadPoolExecutor() as threads:
        made = [
            threads.submit(environments.installed, folder / f"py{minor}", path, *RUNTIME, *PACKAGES[minor])
            for minor, path in found.items()
        ]
        return dict(zip(found, [one.result() for one in made], strict=True))


@pytest.fixture(scope="module")
def nodes(pythons):
    """Node 0 has our Python; node 1's agentd runs on 3.10 and so do its workers; 2 and 3 have interpreters beside."""

    def start(arguments, run_dir, tell, env):
        if "--node-rank" not in arguments or arguments[arguments.index("--node-rank") + 1] != "1":
            return start_ours(arguments, run_dir, tell, env)
        command = [pythons[10], "-m", "agentd", *arguments, "--owner-pid", str(os.getpid())]
        with open(f"{run_dir}/agentd.log", "ab") as log:
            return subprocess.Popen(
                [*command, "--run-dir", run_dir, "--ready-fd", str(tell)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(tell,),
                env=env,
                cwd=run_dir,
            )

    start_ours = local_cluster.start_agentd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_cluster, "start_agentd", start)
        env = {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}", "RLINF_EXT_MODULE": "arm_hardware"}
        with LocalCluster(4, env=env) as local:
            yield local


@pytest.fixture(scope="module")
def cluster(nodes, pythons):
    arm = {"type": "LeasedArm", "configs": [{"node_rank": 1, "address": ah.ADDRESSES[0]}]}
    labels = [{"label": "py10", "node_ranks": 1}, {"label": "lab", "node_ranks": 1, "hardware": arm}]
    for rank, minor in ((2, 12), (3, 13)):
        interpreter = {"node_ranks": rank, "python_interpreter_path": pythons[minor]}
        labels.append({"label": f"py{minor}", "node_ranks": rank, "env_configs": [interpreter]})
    return nodes.cluster(cluster_cfg={"num_nodes": 4, "component_placement": {}, "node_groups": labels})


def on(cluster, minor, cls=mw.Mixed, name=None):
    """Launch *cls* on a worker of that Python."""
    where = NodePlacementStrategy([0]) if minor == 11 else NodePlacementStrategy([0], node_group_label=f"py{minor}")
    return cls.create_group().launch(cluster, where, name=name or f"on{minor}")


@pytest.fixture(scope="module")
def groups(cluster):
    return {minor: on(cluster, minor) for minor in (10, 11, 12, 13)}


def test_workers_run_on_their_own_python_and_numpy(groups):
    found = {minor: group.versions().wait()[0] for minor, group in groups.items()}
    ours = int(numpy.__version__.partition(".")[0])
    assert found == {10: (10, 1), 11: (sys.version_info[1], ours), 12: (12, ours), 13: (13, 0)}
    assert ours >= 2


@pytest.mark.parametrize("minor", OTHERS)
def test_values_and_importable_functions_travel_between_interpreters(groups, minor):
    sent = mw.expected(has_numpy(minor))
    (back,) = groups[minor].back(sent, has_numpy(minor)).wait()
    assert mw.same(back, sent)
    assert groups[minor].apply(mw.half, 5).wait() == [2.5]
    assert all(mw.same(item, sent) for _, item in groups[minor].stream(has_numpy(minor)))


@pytest.mark.parametrize("minor", OTHERS)
def test_errors_keep_type_and_traceback_between_interpreters(groups, minor):
    with pytest.raises(mw.ArmFault, match=rf"on{minor}:0 .* raised mixed_workers.ArmFault: joint 3") as caught:
        groups[minor].fail(True).wait()
    assert isinstance(caught.value, WorkerError)
    assert caught.value.joint == 3
    assert 'raise ArmFault(3) from KeyError("cause")' in caught.value.remote_traceback
    assert "KeyError: 'cause'" in caught.value.remote_traceback
    with pytest.raises(ValueError, match="raised ValueError: bad"):
        groups[minor].fail(False).wait()


@pytest.mark.parametrize(("sender", "receiver"), ARROWS)
def test_messages_travel_between_interpreters(groups, sender, receiver):
    a, b, arrays = groups[sender], groups[receiver], has_numpy(sender, receiver)
    works = [a.say(f"on{receiver}", arrays), b.hear(f"on{sender}", arrays)]
    assert [work.wait() for work in works] == [[None], [True]]
    works = [a.say_failure(f"on{receiver}"), b.hear_failure(f"on{sender}")]
    assert [work.wait() for work in works] == [[None], [("ArmFault", 5)]]


@pytest.mark.parametrize("first", [10, 11, 12])
def test_broadcast_reaches_all_interpreters(groups, first):
    ranks = [(f"on{first}", [0]), *((f"on{minor}", [0]) for minor in (10, 11, 12) if minor != first)]
    works = [groups[minor].share(ranks, f"on{first}", True) for minor in (10, 11, 12)]
    assert [work.wait() for work in works] == [[True]] * 3


@pytest.mark.parametrize("host", [0, 1])
def test_channels_work_between_all_interpreters(groups, cluster, host):
    channel = Channel.create(f"items{host}", node_rank=host)
    for sender, receiver in ARROWS:
        arrays = has_numpy(sender, receiver)
        groups[sender].put(channel, arrays).wait()
        assert groups[receiver].take(channel, arrays).wait() == [True]
    channel.put(mw.expected(True))
    assert groups[10].take(channel, True).wait() == [True]
    groups[10].put(channel, True).wait()
    assert mw.same(channel.get(), mw.expected(True))
    channel.close()


def test_robot_on_python_3_10_reports_to_all_interpreters(groups, cluster):
    for name in ("arm", "arm-again"):  # the lease ends with its group
        arm = mw.Arm.create_group().launch(cluster, ah.on(0), name=name)
        assert arm.about().wait() == [(ah.ADDRESSES[0], 10, True)]
        channel = Channel.create(f"readings-of-{name}", node_rank=2)
        reporting = arm.report(channel, 4)
        got = [channel.get(), *groups[12].take_some(channel, 2).wait()[0], *groups[13].take_some(channel, 1).wait()[0]]
        assert got == [mw.Reading("arm", [float(n)]) for n in range(4)]
        reporting.wait()
        channel.close()
        arm.shutdown()


ACROSS = r"sent by value comes from Python 3\.{} and this process runs 3\.{}: put it in a module that both can import"


@pytest.mark.parametrize("minor", OTHERS)
def test_a_class_by_value_is_refused_at_launch(cluster, minor):
    class Here(Worker):
        def one(self):
            return 1

    with pytest.raises(WorkerStartError, match=f"here{minor}:0 on node.*" + ACROSS.format(sys.version_info[1], minor)):
        on(cluster, minor, Here, f"here{minor}").one().wait()
    assert on(cluster, 11, Here, f"ours{minor}").one().wait() == [1]


def test_a_function_by_value_is_refused_wherever_it_goes(groups, cluster):
    ten, twelve = groups[10], groups[12]
    ours = sys.version_info[1]
    with pytest.raises(WorkerError, match=ACROSS.format(ours, 10)):
        ten.apply(lambda: 1).wait()
    with pytest.raises(SerializationError, match=r"by_value\(\) from on10:0 .*" + ACROSS.format(10, ours)):
        ten.by_value().wait()
    works = [twelve.say_by_value("on10"), ten.hear_refused("on12")]
    _, ((text, after),) = (work.wait() for work in works)
    refusal = re.compile("a class or function " + ACROSS.format(12, 10))
    assert refusal.match(text)
    assert after == "next"
    channel = Channel.create("by-value")
    twelve.put_by_value(channel).wait()
    (text,) = ten.take_refused(channel).wait()
    assert refusal.match(text)
    assert twelve.take_by_value(channel).wait() == [[1, "next"]]  # it went back, for those who can read it


def test_value_that_numpy_1_cannot_read_is_an_error_that_says_so(groups):
    with pytest.raises(WorkerError, match=r"a random generator of numpy 2 \(PCG64\) cannot be read by numpy 1\.26"):
        groups[10].apply(mw.half, numpy.random.default_rng(1)).wait()
    (generator,) = groups[10].random().wait()
    assert generator.integers(0, 100, 5).tolist() == numpy.random.default_rng(1).integers(0, 100, 5).tolist()
