"""The result of a run, as a value, as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaos_invariants import faults, noticed, outcomes, percentile
from chaos_record import Records


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
        seed, seconds, every: as asked for.
        faults: kind to how many there were.
        outcomes: what drivers did, to how it ended, to how often.
        noticed_ms: milliseconds from a worker's kill until its caller knew: p50, p99, max, and of how many.
        violations: of promises; what a reader needs to look for the cause.
    """

    seed: int
    seconds: float
    every: float
    faults: Mapping[str, int]
    outcomes: Mapping[str, Mapping[str, int]]
    noticed_ms: Mapping[str, float]
    violations: Sequence[str]

    @classmethod
    def of(cls, records: Records, seed: int, seconds: float, every: float, violations: Sequence[str]) -> Report:
        """The report on these records."""
        times = [1000 * each for each in noticed(records)]
        latency = {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99), "max": percentile(times, 1.0)}
        return cls(
            seed, seconds, every, faults(records), outcomes(records), {**latency, "count": len(times)}, list(violations)
        )

    def text(self) -> str:
        """The report as text."""
        lines = [f"chaos: seed {self.seed}, {self.seconds:g} s, a fault every {self.every:g} s", "faults:"]
        lines += [f"  {kind}: {count}" for kind, count in sorted(self.faults.items())]
        lines += ["operations:"]
        for doing, ends in self.outcomes.items():
            lines.append(f"  {doing}: " + ", ".join(f"{end} {count}" for end, count in sorted(ends.items())))
        ms = self.noticed_ms
        lines.append(
            f"a worker's kill was noticed after {ms['p50']:.1f} ms (p50), {ms['p99']:.1f} ms (p99), "
            f"{ms['max']:.1f} ms (max), of {ms['count']:.0f}"
        )
        lines.append(f"violations: {len(self.violations)}")
        return "\n".join([*lines, *(f"  {violation}" for violation in self.violations)])
