"""TracerConfig: the ``cluster.tracer`` section."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_actors.errors import ConfigError
from rlinf_actors.tracing.ring import DEFAULT_EVENTS, MAX_EVENTS


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
