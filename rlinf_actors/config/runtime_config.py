"""RuntimeConfig: the ``cluster.runtime`` section."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_actors.errors import ConfigError


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
