"""ProfilingConfig: the ``cluster.profiling`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf_actors.errors import ConfigError


@dataclass(frozen=True)
class ProfilingConfig:
    """The ``profiling`` section of a cluster's configuration.

    Attributes:
        backend: name of the profiler, such as ``nsight``.
        enabled: False turns the section off.
        worker_groups: names of the groups to profile; None for no group.
        steps: numbers of the training steps to profile; None for all steps.
        output_dir: directory of the profiler's output; None for the default.
        options: (nsight) options with values.
        flags: (nsight) options without values.
        args: (rocprof_sys) options of the command.
        env: (rocprof_sys) environment variables of the profiled workers.
    """

    backend: str = ""
    enabled: bool = True
    worker_groups: str | list[str] | None = None
    steps: list[int] | None = None
    output_dir: str | None = None
    options: dict[str, Any] | None = None
    flags: str | list[str] | None = None
    args: dict[str, Any] | None = None
    env: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.backend:
            raise ConfigError("backend must be specified: it names the profiler, e.g. backend: nsight", path="backend")
