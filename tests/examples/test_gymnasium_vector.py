"""The example gymnasium_vector gives what gymnasium's own SyncVectorEnv gives, in each autoreset mode.

Gymnasium has no check of its own for a VectorEnv: its check_env takes single environments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pace
import pytest

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install -e '.[test]'")
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gymnasium_vector"
pytestmark = pytest.mark.live


def run(*command: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RLINF_HEAD")}
    done = subprocess.run(
        [sys.executable, *command], cwd=FOLDER, env=clean,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PROGRAM = """
import json, os, signal
import gymnasium, numpy as np
from gymnasium.utils.env_match import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from worker_vector_env import WorkerVectorEnv
from rlinf_actors import Cluster, NodePlacementStrategy, WorkerDiedError

def make():
    env = gymnasium.make("CartPole-v1", max_episode_steps=30, render_mode=None)
    env.unwrapped.pid = os.getpid()
    return gymnasium.wrappers.RecordEpisodeStatistics(env)  # whose infos have a dictionary

def comparable(answer):  # the times of episodes are their own
    for infos in (answer[-1], answer[-1].get("final_info", {})):
        infos.get("episode", {}).pop("t", None)
        infos.get("episode", {}).pop("_t", None)
    return answer

def other():
    return gymnasium.make("Pendulum-v1")

said = {}
with Cluster(num_nodes=1) as cluster:
    two = NodePlacementStrategy([0, 0])
    for mode in AutoresetMode:
        ours = WorkerVectorEnv([make] * 3, cluster, two, autoreset_mode=mode)
        theirs = SyncVectorEnv([make] * 3, autoreset_mode=mode)
        equal = [data_equivalence(ours.reset(seed=7), theirs.reset(seed=7))]
        ended = 0
        ours.action_space.seed(0)
        for number in range(80):
            actions = ours.action_space.sample()
            got, wanted = comparable(ours.step(actions)), comparable(theirs.step(actions))
            equal.append(data_equivalence(got, wanted))
            ends = got[2] | got[3]
            ended += int(ends.sum())
            if mode is AutoresetMode.DISABLED and ends.any():
                again = [envs.reset(seed=[number, None, 3], options={"reset_mask": ends}) for envs in (ours, theirs)]
                equal.append(data_equivalence(again[0][1], again[1][1]))
                if ends[1]:  # its seed is None: its generator goes on
                    equal.append(data_equivalence(again[0][0][1], again[1][0][1]))
        spaces = ("single_observation_space", "observation_space", "single_action_space", "action_space", "metadata")
        equal += [getattr(ours, name) == getattr(theirs, name) for name in spaces]
        equal.append(ours.get_attr("gravity") == theirs.get_attr("gravity"))
        ours.set_attr("gravity", [9.0, 9.1, 9.2])
        equal.append(ours.get_attr("gravity") == (9.0, 9.1, 9.2))
        said[mode.value] = [len(equal), sum(equal), ended]
        ours.close()
        ours.close()
    for makes in ([make, other], [make]):
        try:
            WorkerVectorEnv(makes, cluster, two)
        except gymnasium.error.Error as error:
            said[f"error {len(makes)}"] = str(error)
    made = lambda num_envs, **_: WorkerVectorEnv([make] * num_envs, cluster, two, name="made")
    gymnasium.register("Workers-v0", vector_entry_point=made)
    entered = gymnasium.make_vec("Workers-v0", num_envs=4, vectorization_mode="vector_entry_point")
    counted = gymnasium.wrappers.vector.RecordEpisodeStatistics(entered)
    said["wrapped"] = list(counted.reset(seed=1)[0].shape)
    os.kill(entered.get_attr("pid")[-1], signal.SIGKILL)
    try:
        while True:
            counted.step(counted.action_space.sample())
    except WorkerDiedError as error:
        said["died"] = error.worker
    counted.close()
print(json.dumps(said))
"""


def test_workers_give_what_the_sync_vector_gives():
    said = json.loads(run("-c", PROGRAM))
    assert said.pop("error 2") == "the sub-environments have different spaces"
    assert said.pop("error 1") == "1 sub-environments cannot be dealt out to 2 workers"
    assert said.pop("died") == "made:1"
    assert said.pop("wrapped") == [4, 4]
    assert set(said) == {"NextStep", "SameStep", "Disabled"}
    for compared, equal, ended in said.values():
        assert equal == compared > 80
        assert ended > 5


def test_the_program_runs_as_it_says():
    out = run("main.py", "--workers", "2", "--steps", "60")
    assert "60 steps in 2 workers" in out
    assert out.endswith("the same as SyncVectorEnv: True\n")
