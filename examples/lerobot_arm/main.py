"""A policy moves a LeRobot arm to a target that it sees in the camera's frames. Needs lerobot and torch.

One worker holds the robot lease of the arm and runs LeRobot's interface: get_observation, send_action. Another worker
is the policy. Observations with frames travel through one channel, actions through another. Whatever ends, the arm's
last command is hold.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import arm_hardware
import numpy as np
from simulated_so101 import SimulatedSO101, SimulatedSO101Config

from rlinf_actors import Channel, ChannelClosedError, Cluster, ComponentPlacement, NodePlacementStrategy, Worker

HZ = 30


class Arm(Worker):
    """The only worker that talks to the arm."""

    def __init__(self) -> None:
        super().__init__()
        arm = self.hardware_infos[0].config
        self.robot = SimulatedSO101(SimulatedSO101Config(id=arm.id, port=arm.port))  # or SO101Follower
        self.robot.connect()

    def drive(self, observations: Channel, actions: Channel, steps: int) -> int:
        """Send an observation and do the action that answers it, 30 times a second. Return how often none came."""
        late = 0
        for step in range(steps):
            due = time.monotonic() + 1 / HZ
            observations.put((step, self.robot.get_observation()))
            try:
                self.robot.send_action(actions.get(step, timeout=0.5))  # an action that is late is under an older key
            except TimeoutError:
                self.robot.hold()
                late += 1
            time.sleep(max(0.0, due - time.monotonic()))
        return late

    def on_lease_lost(self) -> None:
        """Hold the arm where it is. The other threads of this worker have been stopped before."""
        self.robot.hold()

    def _close(self) -> None:
        self.robot.hold()
        self.robot.disconnect()


class Policy(Worker):
    def run(self, observations: Channel, actions: Channel) -> list[float]:
        """Answer each observation until the channel is closed. Return the distance to the target in each frame."""
        distances: list[float] = []
        while True:
            try:
                step, observation = observations.get()
            except ChannelClosedError:
                return distances
            rows, columns = offset(observation["front"])
            distances.append(float(np.hypot(rows, columns)))
            action = {key: value for key, value in observation.items() if key != "front"}
            action["shoulder_pan.pos"] += columns
            action["shoulder_lift.pos"] -= rows
            actions.put(action, key=step)


def offset(frame: Any) -> tuple[float, float]:
    """Return how many rows and columns the red target is from the white hand."""
    red, green = frame[:, :, 0] > 128, frame[:, :, 1] > 128
    if not (red & ~green).any():
        return 0.0, 0.0  # the hand covers the target
    rows, columns = np.argwhere(red & ~green).mean(axis=0) - np.argwhere(green).mean(axis=0)
    return float(rows), float(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--port", help="of a servos.py that runs already; without it, one is started")
    given = parser.parse_args()
    if given.port:
        drive(given.port, given.steps)
        return
    command = [sys.executable, str(Path(__file__).with_name("servos.py")), os.devnull]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as servos:
        assert servos.stdout is not None
        drive(servos.stdout.readline().strip(), given.steps)


def drive(port: str, steps: int) -> None:
    cluster_cfg = {
        "num_nodes": 1,
        "component_placement": {"arm": {"node_group": "arms", "placement": 0}},
        "node_groups": [
            {
                "label": "arms",
                "node_ranks": 0,
                "hardware": {
                    "type": arm_hardware.HW_TYPE,
                    "configs": [{"node_rank": 0, "id": "left", "port": port}],
                },
            }
        ],
    }
    with Cluster(cluster_cfg=cluster_cfg) as cluster:
        on_the_arm = ComponentPlacement({"cluster": cluster_cfg}, cluster).get_strategy("arm")
        arm = Arm.create_group().launch(cluster, on_the_arm, name="arm")
        policy = Policy.create_group().launch(cluster, NodePlacementStrategy([0]), name="policy")
        observations, actions = Channel.create("observations", maxsize=1), Channel.create("actions")
        answering = policy.run(observations, actions)
        print("driving", flush=True)
        [late] = arm.drive(observations, actions, steps).wait()
        observations.close()
        [distances] = answering.wait()
        arm.shutdown()
    print(f"{len(distances)} frames, {late} without an action in time")
    print(f"the target was {distances[0]:.0f} pixels away, and is {distances[-1]:.0f} pixels away")


if __name__ == "__main__":
    main()
