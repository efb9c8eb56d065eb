"""Small sections of the ``cluster:`` configuration: RuntimeConfig, TracerConfig and AutoSchedulerConfig."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_actors.errors import ConfigError
from rlinf_actors.tracing.ring import DEFAULT_EVENTS, MAX_EVENTS


@dataclass(frozen=True)
class RuntimeConfig:
    """The ``runtime`` section of a cluster's configuration.

    Attributes:
        working_dir: directory on the driver's machine whose code the workers run; None if each node has its own code.
        excludes: patterns of files and directories below it that are not sent, such as ``["data/", "*.ckpt"]``.
        max_file_mb: size in MiB of the largest file that may be sent.
    """

    working_dir: str | None = None
    excludes: list[str] = field(default_factory=list)
    max_file_mb: int = 16

    def __post_init__(self) -> None:
        if self.max_file_mb < 1:
            raise ConfigError(f"is {self.max_file_mb}; it must be a whole number of MiB above 0", path="max_file_mb")


@dataclass(frozen=True)
class TracerConfig:
    """The ``tracer`` section of a cluster's configuration.

    Attributes:
        enable: True if the job records a trace.
        output_file: path of the trace file on the driver's machine; None for ``trace.json`` in the log directory, or
            in the current directory without one. With the suffix ``.jsonl``, the file has one event in each line, and
            the file that Perfetto opens is beside it, with the suffix ``.json``.
        events: number of events that each process keeps, the newest. Each takes 48 bytes of memory.
    """

    enable: bool = False
    output_file: str | None = None
    events: int = DEFAULT_EVENTS

    def __post_init__(self) -> None:
        if not 0 < self.events <= MAX_EVENTS:
            raise ConfigError(f"is {self.events}; it must be from 1 to {MAX_EVENTS}", path="events")


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
