"""TracerConfig: the ``cluster.tracer`` section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TracerConfig:
    """The ``tracer`` section of a cluster's configuration.

    Attributes:
        enable: True if the job records a trace.
        output_file: path of the trace file on the driver's machine; None for the default path.
    """

    enable: bool = False
    output_file: str | None = None
