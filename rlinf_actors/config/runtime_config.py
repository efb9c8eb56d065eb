"""RuntimeConfig: the ``cluster.runtime`` section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RuntimeConfig:
    """The ``runtime`` section of a cluster's configuration.

    Attributes:
        working_dir: directory on the driver's machine whose code the workers run; None if each node has its own code.
    """

    working_dir: str | None = None
