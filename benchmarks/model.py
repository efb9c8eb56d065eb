"""What a benchmark is: a case measures figures, a backend is what it measures them of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from benchmarks.hosts import TwoHosts

Figures = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        name: key in what a case gives.
        title: what the row says.
        unit: of the number: "s", "us", "/s", "GB/s", "MB" or "".
        better: which way is better.
        limit: the raw backend's figure that ours is divided by; the one of the same name by default.
        reach_limit: what ours / raw is to be: at most (lower is better) or at least (higher is better).
        reach_ray: what ray / ours is to be: at least (lower is better) or at most (higher is better).
    """

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    limit: str = ""
    reach_limit: float | None = None
    reach_ray: float | None = None

    @property
    def limit_name(self) -> str:
        """The raw figure that ours is divided by."""
        return self.limit or self.name


@dataclass(frozen=True)
class Case:
    """One benchmark. It runs in a fresh process per backend and repetition.

    Attributes:
        name: on the command line.
        title: heading in the table.
        figures: what it measures.
        measure: does so, given a runtime that is not started; it stops what it starts.
        driver_imports: modules that the driver has loaded before the clock starts, as a training script has.
        environment: of its processes, beside what they have.
        without: backends that have no such thing.
    """

    name: str
    title: str
    figures: Sequence[Figure]
    measure: Callable[[Runtime], Figures]
    driver_imports: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    without: Sequence[str] = ()


class Group(Protocol):
    """Some workers, each in a process of its own, with the methods of `benchmarks.methods`."""

    def call(self, method: str, *args: object) -> list[object]:
        """One call on every worker, waited for from a plain script; the values in rank order."""

    async def call_async(self, method: str, *args: object) -> list[object]:
        """The same, awaited."""

    def burst(self, method: str, count: int) -> None:
        """Start *count* calls on every worker, then wait for all."""

    async def burst_async(self, method: str, count: int) -> None:
        """The same, awaited."""

    def exchange(self, size: int, count: int) -> list[float]:
        """Seconds of each of *count* objects from worker 0 to 1 and back: arrays of *size* bytes, 0 for a dict."""

    def transfer(self, kept: bool, size: int, count: int) -> list[float]:
        """Seconds of each of *count* torch tensors of *size* bytes from worker 0 until worker 1 has it.

        *kept*: into a tensor that worker 1 keeps, where there is such a call; otherwise it gets a new one.
        """

    def spread(self, size: int, count: int) -> list[float]:
        """Seconds of each of *count* arrays of *size* bytes from worker 0 until all other workers have it."""

    def queue(self, size: int, count: int, window: int) -> float:
        """Items a second through a queue, from worker 0 to 1: *count* of *size* bytes, *window* under way at a time."""

    def release(self) -> None:
        """End the workers; returns when they are gone or as good as gone."""


class Runtime(Protocol):
    """A runtime under test.

    Attributes:
        IMPORT: the statement that loads it.
        NAMES: one that also loads what a script begins with.
    """

    IMPORT: str
    NAMES: str

    def start(self) -> None:
        """A one-node cluster, with no workers."""

    def start_apart(self, hosts: TwoHosts) -> None:
        """A cluster of two nodes, this process's host and the other; worker n of a group is then on node n % 2."""

    def spawn(self, count: int, torch: bool = False) -> Group:
        """Start *count* workers (which import torch); need not wait for them."""

    def stop(self) -> None:
        """End all of it."""


class Backend(Protocol):
    """What the runner knows: a name and a way to measure a case."""

    def measure(self, case: Case) -> Figures:
        """Figures of *case*; those that this backend has no such thing as are left out."""
