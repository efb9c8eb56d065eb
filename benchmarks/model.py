"""Types of a benchmark: a case measures figures of a backend."""

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
        name: key in the figures that a case returns.
        title: heading of the row.
        unit: of the number: "s", "us", "/s", "GB/s", "MB" or "".
        better: whether lower or higher values are better.
        limit: name of the raw backend's figure by which ours is divided; by default the same name.
        reach_limit: target of ours / raw: at most this if lower is better, else at least this.
        reach_ray: target of ray / ours: at least this if lower is better, else at most this.
        reach_prototype: target of ours / prototype: at most this if lower is better, else at least this.
        reference: the raw figure on the reference machine, in the same unit (docs/explanation/performance.md).
    """

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    limit: str = ""
    reach_limit: float | None = None
    reach_ray: float | None = None
    reach_prototype: float | None = None
    reference: float | None = None

    @property
    def limit_name(self) -> str:
        """Name of the raw figure by which ours is divided."""
        return self.limit or self.name


@dataclass(frozen=True)
class Case:
    """One benchmark. It runs in a new process for each backend and repetition.

    Attributes:
        name: name on the command line.
        title: heading in the table.
        figures: the measured figures.
        measure: measures them with a runtime that is not started; stops everything that it starts.
        driver_imports: modules that the driver imports before the clock starts, as a training script does.
        environment: additional variables of its processes.
        without: backends that cannot run the case.
    """

    name: str
    title: str
    figures: Sequence[Figure]
    measure: Callable[[Runtime], Figures]
    driver_imports: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    without: Sequence[str] = ()


class Group(Protocol):
    """Workers, each in its own process, with the methods of `benchmarks.methods`."""

    def call(self, method: str, *args: object) -> list[object]:
        """Call *method* on every worker and wait. Return the results in rank order."""

    async def call_async(self, method: str, *args: object) -> list[object]:
        """Do the same as `call`, in a coroutine."""

    def burst(self, method: str, count: int) -> None:
        """Start *count* calls on every worker, then wait for all."""

    async def burst_async(self, method: str, count: int) -> None:
        """Do the same as `burst`, in a coroutine."""

    def exchange(self, size: int, count: int) -> list[float]:
        """Return the seconds of *count* round trips of an array of *size* bytes (0: a dict) from worker 0 to 1."""

    def transfer(self, kept: bool, size: int, count: int) -> list[float]:
        """Return the seconds of *count* transfers of a torch tensor of *size* bytes from worker 0 to worker 1.

        *kept*: True to receive into the same tensor each time, if the runtime can; False to receive a new tensor.
        """

    def spread(self, size: int, count: int) -> list[float]:
        """Return the seconds of *count* broadcasts of an array of *size* bytes from worker 0 to all other workers."""

    def queue(self, size: int, count: int, window: int) -> float:
        """Send *count* items of *size* bytes by a queue from worker 0 to 1, *window* at a time. Return items/s.

        The queue has room for `cases.queues.ROOM` times *window* items.
        """

    def release(self) -> None:
        """End the workers, and wait until they have ended or are certain to end."""


class Runtime(Protocol):
    """A runtime under test.

    Attributes:
        IMPORT: statement that imports the runtime.
        NAMES: statement that also imports the names that scripts need first.
    """

    IMPORT: str
    NAMES: str

    def start(self) -> None:
        """Start a cluster of one node, without workers."""

    def start_apart(self, hosts: TwoHosts) -> None:
        """Start a cluster of two nodes: this host and the other one. Worker n of a group is then on node n % 2."""

    def spawn(self, count: int, torch: bool = False) -> Group:
        """Start *count* workers, which import torch if *torch* is True. May return before they run."""

    def stop(self) -> None:
        """Stop the cluster."""


class Backend(Protocol):
    """Measures cases on one system."""

    def measure(self, case: Case) -> Figures:
        """Measure *case* and return its figures, without those that this backend cannot measure."""
