"""The first program of an RLinf user. Only the import differs (RLinf: ``from rlinf.scheduler import ...``).

On a machine with four accelerators, run one process on each: python examples/hydra_first_program/main.py
On a machine without accelerators, run four processes on the node:
    python examples/hydra_first_program/main.py 'cluster.component_placement.test_worker.placement="0:0-3"'
"""

import hydra
from omegaconf import DictConfig

from rlinf_actors import Cluster, ComponentPlacement, Worker


class TestWorker(Worker):
    def __init__(self) -> None:
        super().__init__()

    def run(self) -> None:
        self.log_info(f"Hello from TestWorker rank {self._rank}!")


@hydra.main(version_base=None, config_path=".", config_name="conf")
def main(cfg: DictConfig) -> None:
    cluster = Cluster(cluster_cfg=cfg.cluster)
    placement = ComponentPlacement(cfg, cluster)
    strategy = placement.get_strategy("test_worker")
    worker = TestWorker.create_group().launch(cluster, placement_strategy=strategy)
    worker.run().wait()


if __name__ == "__main__":
    main()
