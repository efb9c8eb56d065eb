"""The table of a run: one row a figure, one column a size. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.table import quantity

BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"

ROWS = (
    ("join", "half_s", "all agents join at once: half have registered", "s", ""),
    ("join", "all_s", "all have registered", "s", "≤ 1 s"),
    ("join", "head_cpu_s", "CPU of the head for it", "s", ""),
    ("idle", "head_cpu_percent", "CPU of the head, agents without workers", "%", ""),
    ("launch", "get_nodes_s", "a client asks for all nodes", "s", ""),
    ("launch", "answer_s", "a client launches on all nodes: the head has answered", "s", ""),
    ("launch", "all_run_s", "the client knows that all run", "s", ""),
    ("launch", "notices", "messages to the client", "", ""),
    ("launch", "head_us_per_worker", "CPU of the head per worker", "us", ""),
    ("beats", "head_cpu_percent", "CPU of the head, agents with workers", "%", "≤ 10 %"),
    ("beats", "head_mb", "memory of the head", "MB", ""),
    ("deaths", "p50_ms", "a worker's death is announced, p50", "ms", ""),
    ("deaths", "p99_ms", "p99", "ms", "≤ 10 ms"),
    ("deaths", "node_at_once_ms", "all workers of a node die at once", "ms", ""),
    ("node", "announced_s", "a silent node is announced (lease: 10 s)", "s", ""),
    ("restart", "half_s", "a new head: half of the agents are back", "s", ""),
    ("restart", "all_s", "the last agent is back", "s", "≤ 3 s"),
    ("restart", "head_cpu_s", "CPU of the new head until then", "s", ""),
    ("restart", "head_mb", "memory of the new head", "MB", "≤ 200 MB"),
    ("restart", "after_cpu_percent", "CPU of the new head after that", "%", ""),
    ("driver", "connect_s", "a script connects", "s", ""),
    ("driver", "launch_s", "launch() has returned", "s", ""),
    ("driver", "ready_s", "all of its workers are ready", "s", "≤ 8 s"),
    ("driver", "cpu_s", "CPU of the script for it", "s", "≤ 3 s"),
    ("driver", "rss_mb", "memory of the script", "MB", ""),
    ("driver", "descriptors_per_worker", "descriptors of the script per worker", "", "≤ 1"),
    ("driver", "head_cpu_s", "CPU of the head for it", "s", ""),
    ("driver", "fan_out_s", "one call of all workers (one process answers for all)", "s", ""),
    ("driver", "fan_out_cpu_s", "CPU of the script for it", "s", ""),
    ("driver", "stop_s", "the group is shut down", "s", ""),
    ("driver", "shutdown_s", "the Cluster is shut down", "s", ""),
    ("placement of accelerators", "rules_s", "placement on accelerators: reading the rules, CPU", "s", ""),
    ("placement of accelerators", "placements_s", "placements", "s", ""),
    ("placement of accelerators", "specs_s", "specs of the workers", "s", ""),
    ("placement of accelerators", "message_mb", "size of the specs", "MB", ""),
    ("placement of nodes", "rules_s", "placement on nodes: reading the rules, CPU", "s", ""),
    ("placement of nodes", "placements_s", "placements", "s", ""),
    ("placement of nodes", "specs_s", "specs of the workers", "s", ""),
    ("tables", "hello_us", "tables of the head, CPU: first hello of an agent", "us", ""),
    ("tables", "hello_again_us", "hello of a known agent", "us", ""),
    ("tables", "beat_us", "beat of an agent", "us", ""),
    ("tables", "launch_per_worker_us", "launch, per worker", "us", ""),
    ("tables", "ready_us", "WorkerReady", "us", "≤ 20 us"),
    ("tables", "exit_us", "WorkerExited", "us", ""),
)
"""Part or phase, name of the figure, title, unit, and the target at 1,000 agents with 10 workers each."""

Sized = Mapping[str, Any]
"""The figures of one size, as in the JSON file: agents, per_agent, keys, figures."""


def rows(sizes: Sequence[Sized]) -> list[list[str]]:
    """Return the heading and the rows that any size has figures for."""
    table = [["figure", *(_heading(size) for size in sizes), "reach"]]
    for part, name, title, unit, reach in ROWS:
        values = [size["figures"].get(part, {}).get(name) for size in sizes]
        if any(value is not None for value in values):
            table.append([title, *(quantity(value, unit) for value in values), reach])
    return table


def errors(sizes: Sequence[Sized]) -> list[str]:
    return [
        f"{_heading(size)}: {part}: {figures['error']}"
        for size in sizes
        for part, figures in size["figures"].items()
        if "error" in figures
    ]


def text(sizes: Sequence[Sized]) -> str:
    """Render for a terminal."""
    table = rows(sizes)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]
    return "\n".join([*lines, *errors(sizes)])


def markdown(report: Mapping[str, Any]) -> str:
    """Render for docs/explanation/performance.md: the command, the machine and the table."""
    machine, (heading, *body) = report["machine"], rows(report["sizes"])
    return "\n".join([
        f"`{report['command']}`, on {machine['processors']} processors, {machine['memory_gib']} GiB, "
        f"{machine['kernel']}, Python {machine['python']}. The target counts at 1,000 agents with 10 workers each.",
        "",
        "| " + " | ".join(heading) + " |",
        "|---|" + "---:|" * (len(heading) - 1),
        *("| " + " | ".join(row) + " |" for row in body),
        *(["", *errors(report["sizes"])] if errors(report["sizes"]) else []),
    ])  # fmt: skip


def _heading(size: Sized) -> str:
    return f"{size['agents']:,} × {size['per_agent']}{', keys' if size['keys'] else ''}"
