"""RLinf's own bench_channel.py and bench_broadcast.py, unchanged, on Ray and here in turn.

    RLINF_SRC=~/RLinf python -m tests.rlinf.bench_programs --ray ~/ray/bin/python [--rounds 3]

`--ray` names an interpreter that has Ray and RLinf's packages. The table has the median of each figure over the rounds,
and the ratio of Ray's to ours: above 1 is faster here.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.rlinf.on_ray import apart

CHANNEL = ["--num-messages", "200"]
RUNS = {  # name: file and arguments
    "channel 1 KB": ("bench_channel.py", [*CHANNEL, "--payload-size", "1KB"]),
    "channel 1 MB": ("bench_channel.py", [*CHANNEL, "--payload-size", "1MB"]),
    "channel 1 MB tensor": ("bench_channel.py", [*CHANNEL, "--payload-size", "1MB", "--payload-type", "cpu_tensor"]),
    "broadcast": ("bench_broadcast.py", ["--sizes", "1KB,1MB,64MB", "--num-iters", "10", "--num-receivers", "3"]),
}


def figures(name: str, output: str) -> dict[str, float]:
    """Return the milliseconds of each figure that a benchmark printed."""
    found = {}
    for title, line in re.findall(r"^=== (.+) ===\n(.+)$", output, re.MULTILINE):
        messages = re.search(r"throughput=([\d.]+) msg/s", line)
        if messages is not None:
            found[f"{name}: {title}"] = 1000 / float(messages.group(1))
    row = r"^(\w+) +\| (recv x\d+|sender) +\| +([\d.]+ \wB) .*mean= *([\d.]+) ms"
    for method, role, size, mean in re.findall(row, output, re.MULTILINE):
        if role != "sender":  # on Ray a send without wait ends when it is queued
            found[f"{method} {size}, {role}"] = float(mean)
    return found


def run(command: list[str], name: str, source: str, seconds: float, ray: str | None = None) -> dict[str, float]:
    """Run one benchmark by `command`, or on Ray by the Python `ray`; return its figures."""
    file, arguments = RUNS[name]
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "RLINF_SRC": source, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as directory:
        if ray is not None:
            command, variables = apart(ray, directory)
            env |= variables
        program = [*command, str(Path(source, "tests", "unit_tests", file)), *arguments]
        ran = subprocess.run(
            program, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=seconds
        )
    found = figures(name, ran.stdout)
    if ran.returncode != 0 or not found:
        raise AssertionError(f"{name} ended with {ran.returncode}:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    return found


def main() -> None:
    """Run the benchmarks that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(RUNS))
    parser.add_argument("--source", default=os.environ.get("RLINF_SRC"), help="RLinf's checkout (RLINF_SRC)")
    parser.add_argument("--ray", required=True, help="a Python with Ray and RLinf's packages")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="the longest time of one run")
    args = parser.parse_args()
    here = [sys.executable, "-m", "rlinf_actors.dropin"]
    ray, own, loads = {}, {}, []
    for _ in range(args.rounds):
        for name in args.names:
            for figure, value in run([], name, args.source, args.seconds, ray=args.ray).items():
                ray.setdefault(figure, []).append(value)
            for figure, value in run(here, name, args.source, args.seconds).items():
                own.setdefault(figure, []).append(value)
            loads.append(os.getloadavg()[0])
            print(f"{name}: load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    print(f"load: {min(loads):.1f} to {max(loads):.1f}\n\n| benchmark | Ray | here | ratio |\n|---|---|---|---|")
    for figure in own:
        theirs, ours = statistics.median(ray[figure]), statistics.median(own[figure])
        print(f"| {figure} | {theirs:.2f} ms | {ours:.2f} ms | {theirs / ours:.1f} |")


if __name__ == "__main__":
    main()
