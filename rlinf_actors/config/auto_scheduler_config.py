"""AutoSchedulerConfig: the keys of the ``cluster:`` section that RLinf's dynamic scheduler reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AutoSchedulerConfig:
    """The keys of a cluster's configuration for a scheduler that moves resources between groups at run time.

    Attributes:
        auto_scheduler: True if the job runs such a scheduler.
        use_pre_process_policy: True if the actor's resources work for the rollout first.
        use_wait_before_last_iter_policy: True if the last training iteration waits for the rollout's end.
        recreate_nccl_groups: True if the job builds its NCCL groups again after a change.
    """

    auto_scheduler: bool = False
    use_pre_process_policy: bool = False
    use_wait_before_last_iter_policy: bool = False
    recreate_nccl_groups: bool = False

    def done_anyway(self) -> list[str]:
        """Return a sentence for each key whose effect this runtime has without it."""
        if not self.recreate_nccl_groups:
            return []
        return [
            "cluster.recreate_nccl_groups: process groups that carry messages are made again by themselves when ranks "
            "change; the key is for the groups that the job makes itself"
        ]
