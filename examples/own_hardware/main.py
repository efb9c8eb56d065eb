"""A worker moves an arm of the hardware type DeskArm, which a process simulates. README.md says how to run it.

This program does not import the type. rlinf-actors finds it by its installed package or by RLINF_EXT_MODULE.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

from desk_arm import simulated
from desk_arm.link import ask

from rlinf_actors import Cluster, ComponentPlacement, Worker


class Mover(Worker):
    """Moves its arm."""

    def move(self, degrees: int) -> str:
        arm = self.hardware_infos[0]
        ask(arm.config.port, f"MOVE {degrees}")
        return f"{arm.model} {arm.serial} at {arm.config.port} stands at {ask(arm.config.port, 'POS')} degrees"


def config(port: str) -> dict[str, Any]:
    """Return the configuration of one node with one arm."""
    return {
        "cluster": {
            "num_nodes": 1,
            "component_placement": {"mover": {"node_group": "desk", "placement": 0}},
            "node_groups": [
                {
                    "label": "desk",
                    "node_ranks": 0,
                    "hardware": {"type": "DeskArm", "configs": [{"node_rank": 0, "port": port, "reach_mm": 250}]},
                }
            ],
        }
    }


async def main(port: str) -> None:
    settings = config(port)
    async with Cluster.connect(cluster_cfg=settings) as cluster:
        found = cluster.get_node_info(0).get_hardware_infos("DeskArm")
        print(f"node 0 has {len(found)} DeskArm: {found[0].serial}")
        strategy = ComponentPlacement(settings, cluster).get_strategy("mover")
        mover = Mover.create_group().launch(cluster, strategy, name="mover")
        print((await mover.move(30))[0])


if __name__ == "__main__":
    with subprocess.Popen(
        [sys.executable, simulated.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as arm:
        assert arm.stdout is not None
        try:
            # an argument is the port of a real arm
            asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else arm.stdout.readline().strip()))
        finally:
            arm.communicate()  # closes the arm's standard input, which ends the process
