"""The command ``python -m benchmarks scale``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.runner import describe_machine
from benchmarks.scale import cluster, placement, report, tables
from benchmarks.scale.roles import Answer
from benchmarks.table import number, put_between

PARTS = ("cluster", "placement", "tables")


def run(options: argparse.Namespace) -> int:
    """Measure the parts at each size, and print the table. Return 1 if a phase failed, else 0."""
    sizes = []
    for agents in options.agents:
        figures: dict[str, Answer] = {}
        if "cluster" in options.parts:
            phases = [phase for phase in cluster.PHASES if phase not in options.skip]
            size = cluster.Size(agents, options.workers, options.keys, options.seconds, options.limit, phases)
            figures |= cluster.measure(size, _progress)
        if "placement" in options.parts:
            of_rules = placement.measure(agents, options.workers)
            figures |= {f"placement of {name}": found for name, found in of_rules.items()}
        if "tables" in options.parts:
            figures["tables"] = tables.measure(agents, options.workers)
        sizes.append({"agents": agents, "per_agent": options.workers, "keys": options.keys, "figures": figures})
        found = {"command": options.command, "machine": describe_machine(), "sizes": sizes}
        if options.json:  # after each size: a larger one may not end
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print(report.text(sizes))
    if options.doc:
        document = Path(options.doc)
        text = put_between(document.read_text(), report.markdown(found), report.BEGIN, report.END)
        document.write_text(text)
    return int(bool(report.errors(sizes)))


def _progress(phase: str, figures: Answer) -> None:
    said = [f"{name} {number(value) if isinstance(value, float) else value}" for name, value in figures.items()]
    print(f"# {phase}: {', '.join(said)}", file=sys.stderr, flush=True)
