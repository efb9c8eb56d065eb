"""Configuration, data and groups of the agent programs."""

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from agent_workers import Actor, Reward, Rollout, Tool
from omegaconf import DictConfig, OmegaConf
from report import Report
from rlinf.runners.agent_runner import AgentRunner
from rlinf.scheduler import Cluster, NodePlacementStrategy
from rlinf.utils.placement import ModelParallelComponentPlacement
from rlinf.workers.agent.tool_worker import ToolWorkerInfo
from torch.utils.data import Dataset

CONFIG = """
cluster:
  num_nodes: 1
  component_placement: {actor: "0:0", rollout: "0:0", reward: "0:0"}
runner:
  task_type: reasoning
  max_epochs: 1
  max_steps: -1
  val_check_interval: -1
  save_interval: -1
  seq_length: 32
  resume_dir: null
  experiment_name: toy
  logger: {project_name: rlinf, experiment_name: toy, logger_backends: []}
algorithm: {kl_beta: 0.0, recompute_logprobs: false, group_size: 3, n_minibatches: 2}
data: {shuffle: false, num_workers: 0, rollout_batch_size: 8, val_rollout_batch_size: null, max_prompt_length: 12}
actor: {group_name: ActorGroup, training_backend: fsdp, model: {}}
rollout: {group_name: RolloutGroup, model: {model_path: none}}
agentloop: {group_name: AgentLoopGroup, print_outputs: false}
"""


@dataclass
class Sum:
    """A row of the data, as RLinf's collate_fn reads it."""

    idx: int
    prompt: torch.Tensor
    length: int
    answer: int
    image_data: Any = None
    multi_modal_inputs: Any = None
    prompt_text: Any = None
    meta: Any = None
    solution: Any = None


class Sums(Dataset[Sum]):
    """Sums of two or three numbers; all prompts have three tokens, 3 is none."""

    def __init__(self, size: int) -> None:
        rows = [(index % 7, index * 3 % 11, index % 5 if index % 2 else None) for index in range(size)]
        self.rows = [
            Sum(
                index,
                torch.tensor([3 if each is None else 10 + each for each in row]),
                3,
                sum(each or 0 for each in row),
            )
            for index, row in enumerate(rows)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sum:
        return self.rows[index]


def configuration(*changes: str) -> DictConfig:
    """Return the configuration with `changes` such as "runner.max_epochs=3"."""
    directory = tempfile.mkdtemp(prefix="rlinf-runner-", dir=os.getcwd())
    paths = OmegaConf.create({"runner": {"output_dir": directory, "logger": {"log_path": directory}}})
    merged = OmegaConf.merge(OmegaConf.create(CONFIG), paths, OmegaConf.from_dotlist(list(changes)))
    assert isinstance(merged, DictConfig)
    return merged


def run(cfg: DictConfig, report: Report, loop: Any, loops: int, judge: bool, reward: bool) -> None:
    """Run AgentRunner with `loops` workers of the class `loop`; then print the report."""
    cluster = Cluster(cluster_cfg=cfg.cluster)
    placement = ModelParallelComponentPlacement(cfg, cluster)
    report.part("cluster")

    def launch(cls: Any, name: str, strategy: Any, *arguments: Any) -> Any:
        return cls.create_group(cfg, *arguments).launch(cluster, name=name, placement_strategy=strategy)

    here = NodePlacementStrategy([0])  # on Ray, the strategies of `placement` need accelerators
    rollout = launch(Rollout, cfg.rollout.group_name, here, placement)
    loop_group = launch(loop, cfg.agentloop.group_name, NodePlacementStrategy([0] * loops), placement)
    actor = launch(Actor, cfg.actor.group_name, here, placement)
    judges = {"judge": launch(Rollout, "judge", here, placement, "cpu", 1.0)} if judge else {}
    rewards = launch(Reward, "RewardGroup", here) if reward else None
    tool = launch(Tool, "add", NodePlacementStrategy([0, 0]))
    runner = AgentRunner(
        cfg=cfg,
        placement=placement,
        train_dataset=Sums(32),
        val_dataset=None,
        rollout=rollout,
        inference=None,
        actor=actor,
        reward=rewards,
        agent_loop=loop_group,
        tool_workers={tool: ToolWorkerInfo(tool_names=["add"], has_session=False)},
        solid_rollouts=judges,
    )
    report.watch(runner)
    runner.init_workers()
    report.part("workers")
    runner.run()
    report.part("run")
    served = [group.state().wait() for group in (rollout, *judges.values())]
    report.write(served=served, tools=sum(tool.state().wait()), global_steps=runner.global_steps)
