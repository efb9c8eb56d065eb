"""Configuration and groups of the embodied programs."""

import os
import tempfile
from typing import Any

from omegaconf import DictConfig, OmegaConf
from report import Report
from rlinf.scheduler import Cluster
from rlinf.utils.placement import HybridComponentPlacement

CONFIG = """
cluster:
  num_nodes: 1
  component_placement: {actor: "0:0-1", rollout: "0:0-2", env: "0:0-1", reward: "0:0-1"}
runner:
  max_epochs: 4
  max_steps: -1
  weight_sync_interval: 1
  val_check_interval: -1
  save_interval: -1
  per_worker_log: false
  logger: {project_name: rlinf, experiment_name: toy, logger_backends: []}
algorithm: {update_epoch: 2, loss_type: actor_critic, staleness_threshold: 1}
actor: {group_name: ActorGroup, seed: 7, lr: 0.05}
rollout: {group_name: RolloutGroup, pipeline_stage_num: 2}
reward: {group_name: RewardGroup}
env:
  group_name: EnvGroup
  train: {total_num_envs: 24, steps: 6, rollout_epoch: 2}
  eval: {total_num_envs: 12, steps: 5}
weight_syncer:
  type: bucket
  bucket: {bucket_size: 40, bucket_device: cpu}
"""


def configuration(*changes: str) -> DictConfig:
    """Return the configuration with `changes` such as "runner.max_epochs=3"."""
    directory = tempfile.mkdtemp(prefix="rlinf-runner-", dir=os.getcwd())
    log = OmegaConf.create({"runner": {"logger": {"log_path": directory}}})
    merged = OmegaConf.merge(OmegaConf.create(CONFIG), log, OmegaConf.from_dotlist(list(changes)))
    assert isinstance(merged, DictConfig)
    return merged


def launch(cfg: DictConfig, report: Report, **classes: Any) -> dict[str, Any]:
    """Start one group for each of actor, rollout, env and reward that `classes` has."""
    cluster = Cluster(cluster_cfg=cfg.cluster, distributed_log_dir=cfg.runner.get("per_worker_log_path"))
    placement = HybridComponentPlacement(cfg, cluster)
    report.part("cluster")
    return {
        name: cls.create_group(cfg).launch(
            cluster, name=cfg[name].group_name, placement_strategy=placement.get_strategy(name)
        )
        for name, cls in classes.items()
    }
