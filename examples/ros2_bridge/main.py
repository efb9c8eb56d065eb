"""A policy that is no ROS node drives a robot of ROS 2, by the bridge of bridge.py. Needs ROS 2 and a robot's topics.

The policy turns each joint by the brightness of the image: a stand-in for yours.
"""

from __future__ import annotations

import argparse

from bridge import RosBridge
from messages import Image, JointState

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker, WorkerGroup


class Policy(Worker):
    def run(self, bridge: WorkerGroup[RosBridge], joints: Channel, images: Channel, steps: int) -> list[float]:
        """Answer joint states and images by commands. Return the last command's positions."""
        goal: list[float] = []
        for _ in range(steps):
            state: JointState = joints.get()
            image: Image = images.get()
            brightness = float(image.pixels().mean()) / 255
            goal = [position + 0.1 * brightness for position in state.position]
            bridge.command(JointState(state.header, state.name, goal)).wait()
        return goal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joints", default="/joint_states")
    parser.add_argument("--images", default="/camera/image_raw")
    parser.add_argument("--commands", default="/joint_commands")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    with Cluster(num_nodes=1) as cluster:
        one = NodePlacementStrategy([0])
        made = RosBridge.create_group(given.joints, given.images, given.commands)
        bridge = made.launch(cluster, one, name="bridge").wait_ready()  # raises if this node has no ROS
        policy = Policy.create_group().launch(cluster, one, name="policy")
        joints, images = Channel.create("joints", maxsize=1), Channel.create("images", maxsize=1)
        serving = bridge.serve(joints, images)
        [goal] = policy.run(bridge, joints, images, given.steps).wait()
        bridge.stop().wait()
        [dropped] = serving.wait()
    print(f"{given.steps} commands, {dropped} messages dropped; the last: {[round(angle, 3) for angle in goal]}")


if __name__ == "__main__":
    main()
