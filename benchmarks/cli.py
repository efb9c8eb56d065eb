"""The command line: compare, render, list, scale, plot, document, setup-ray."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ray_env, runner, summary, table
from benchmarks.backends import BACKENDS
from benchmarks.cases import CASES
from benchmarks.processes import become_subreaper

EX_OK, EX_FAILED, EX_USAGE, EX_UNAVAILABLE, EX_INTERRUPTED = 0, 1, 64, 69, 130
DOCUMENT = runner.ROOT / "docs/explanation/performance.md"
PLOTS = runner.ROOT / "docs/explanation/plots"
TITLES = {name: case.title for name, case in CASES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit code: 1 if a session failed, 64 for usage, 69 without Ray, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return int(options.run(options))
    except subprocess.CalledProcessError as failed:
        print(f"benchmarks: {shlex.join(map(str, failed.cmd))} ended with {failed.returncode}", file=sys.stderr)
        return EX_UNAVAILABLE
    except KeyboardInterrupt:
        print("benchmarks: interrupted; what the session started has been ended", file=sys.stderr)
        return EX_INTERRUPTED


def compare(options: argparse.Namespace) -> int:
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        return _usage(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    names = list(options.cases or CASES)
    backends = options.backends.split(",") if options.backends else list(BACKENDS)
    if unknown := [name for name in backends if name not in BACKENDS]:
        return _usage(f"there is no backend {', '.join(unknown)}; there are {', '.join(BACKENDS)}")
    if options.reps < 1:
        return _usage(f"--reps is {options.reps}; it must be at least 1")
    try:
        ray_python = ray_env.find(options.ray_python)
    except FileNotFoundError as missing:
        return _usage(str(missing))
    if "ray" in backends and ray_python is None:
        hint = f"run `python -m benchmarks setup-ray`, or give --ray-python or {ray_env.RAY_PYTHON}"
        print(f"benchmarks: no environment with Ray: {hint}", file=sys.stderr)
        if options.backends:
            return EX_UNAVAILABLE
        backends.remove("ray")
    become_subreaper()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either way the sweep runs
    pythons = {name: str(ray_python) if name == "ray" else sys.executable for name in backends}
    sessions = runner.run([CASES[name] for name in names], pythons, options.reps, _progress)
    report = summary.as_json(
        [CASES[name] for name in names], sessions, options.reps, backends, runner.describe_machine(), _command(options)
    )
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    _show(report, options.doc)
    return EX_FAILED if any(session.error for session in sessions) else EX_OK


def render(options: argparse.Namespace) -> int:
    _show(json.loads(Path(options.json).read_text()), options.doc)
    return EX_OK


def list_cases(_options: argparse.Namespace) -> int:
    for name, case in CASES.items():
        print(f"{name:18} {case.title}")
    return EX_OK


def scale(options: argparse.Namespace) -> int:
    from benchmarks.scale import cluster, command  # not at the top: sessions of Ray lack what it imports

    if unknown := [name for name in options.parts if name not in command.PARTS]:
        return _usage(f"there is no part {', '.join(unknown)}; there are {', '.join(command.PARTS)}")
    options.skip = options.skip.split(",") if options.skip else []
    if unknown := [name for name in options.skip if name not in cluster.PHASES]:
        return _usage(f"there is no phase {', '.join(unknown)}; there are {', '.join(cluster.PHASES)}")
    try:
        options.agents = [int(count.replace("_", "")) for count in options.agents.split(",")]
    except ValueError:
        return _usage(f"--agents is {options.agents!r}; it must be numbers such as 100,1000")
    options.parts = options.parts or list(command.PARTS)
    options.command = shlex.join(["python", "-m", "benchmarks", *options.given])
    return command.run(options)


def plot(options: argparse.Namespace) -> int:
    from benchmarks import plots

    compared, scaled = (
        json.loads(Path(file).read_text()) if file else None for file in (options.compare, options.scale)
    )
    folder = Path(options.out)
    folder.mkdir(exist_ok=True)
    for path in plots.draw(folder, compared, scaled):
        print(path)
    return EX_OK


def document(options: argparse.Namespace) -> int:
    """Make everything that docs/explanation/performance.md shows: both tables, and the plots."""
    folder = Path(options.keep)
    folder.mkdir(parents=True, exist_ok=True)
    compared, scaled = str(folder / "compare.json"), str(folder / "scale.json")
    agents = "30,100,300,1000" if options.quick else "30,100,300,1000,3000"
    reps = ["--reps", "1"] if options.quick else []
    codes = [
        main(["compare", *reps, "--json", compared, "--doc", str(DOCUMENT)]),
        main(["scale", "--agents", agents, "--json", scaled, "--doc", str(DOCUMENT)]),
        main(["plot", "--compare", compared, "--scale", scaled]),
    ]
    return max(codes)


def setup_ray(options: argparse.Namespace) -> int:
    python = ray_env.set_up(Path(options.venv), options.torch_index, not options.no_torch)
    print(python)
    return EX_OK


def _show(report: dict[str, object], doc: str | None) -> None:
    print(table.text(report["rows"], TITLES))  # type: ignore[arg-type]
    if doc:
        path = Path(doc)
        path.write_text(table.put_between(path.read_text(), table.markdown(report, TITLES)))


def _progress(session: runner.Session) -> None:
    state = "failed" if session.error else "ok"
    left = f", left running: {', '.join(session.left_running)}" if session.left_running else ""
    line = f"# {session.case} {session.backend} {session.repetition}: {state}, load {session.load:.1f}{left}"
    print(line, file=sys.stderr, flush=True)
    if session.error:
        print(session.error, file=sys.stderr, flush=True)


def _command(options: argparse.Namespace) -> str:
    parts = ["python", "-m", "benchmarks", "compare", *options.cases, "--reps", str(options.reps)]
    return shlex.join([*parts, *(["--backends", options.backends] if options.backends else [])])


def _usage(message: str) -> int:
    print(f"benchmarks: {message}", file=sys.stderr)
    return EX_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("compare", help="measure the backends in turn and print the ratios")
    command.add_argument("cases", nargs="*", metavar="CASE", help="all by default; see `list`")
    command.add_argument("--reps", type=int, default=5, help="repetitions, each in a fresh process (default 5)")
    command.add_argument("--backends", metavar="A,B", help=f"of {','.join(BACKENDS)}; default: all that are there")
    command.add_argument("--json", metavar="FILE", help="write every sample and the table to it")
    command.add_argument("--doc", metavar="FILE", help="put the table between the marks of this Markdown file")
    command.add_argument(
        "--ray-python", metavar="PYTHON", help=f"the interpreter that has Ray (env {ray_env.RAY_PYTHON})"
    )
    command.set_defaults(run=compare)
    command = commands.add_parser("render", help="print the table of a JSON file again")
    command.add_argument("json", metavar="FILE")
    command.add_argument("--doc", metavar="FILE", help="put the table between the marks of this Markdown file")
    command.set_defaults(run=render)
    command = commands.add_parser("list", help="the cases")
    command.set_defaults(run=list_cases)
    command = commands.add_parser("scale", help="simulate clusters of many agents and workers on this machine")
    command.add_argument("parts", nargs="*", metavar="PART", help="cluster, placement or tables; all by default")
    command.add_argument("--agents", default="100,1000", metavar="N,N", help="sizes (default %(default)s)")
    command.add_argument("--workers", type=int, default=10, metavar="N", help="workers of each agent (default 10)")
    command.add_argument("--keys", action="store_true", help="the head and all members have keys")
    command.add_argument(
        "--skip", metavar="A,B", help="phases to leave out, of join,idle,launch,beats,deaths,node,restart,driver"
    )
    command.add_argument("--seconds", type=float, default=10, help="duration of a measurement of load (default 10)")
    command.add_argument("--limit", type=float, default=120, help="seconds that a phase may take (default 120)")
    command.add_argument("--json", metavar="FILE", help="write all figures to it")
    command.add_argument("--doc", metavar="FILE", help="put the table between the marks of this Markdown file")
    command.set_defaults(run=scale)
    command = commands.add_parser("plot", help="draw the plots of the documentation (needs matplotlib)")
    command.add_argument("--compare", metavar="FILE", help="JSON file of compare")
    command.add_argument("--scale", metavar="FILE", help="JSON file of scale")
    command.add_argument("--out", metavar="DIR", default=str(PLOTS), help="where (default %(default)s)")
    command.set_defaults(run=plot)
    command = commands.add_parser("document", help="run compare, scale and plot for docs/explanation/performance.md")
    command.add_argument(
        "--keep", metavar="DIR", default="figures", help="where to keep the JSON files (default figures)"
    )
    command.add_argument("--quick", action="store_true", help="one repetition, and at most 1,000 agents")
    command.set_defaults(run=document)
    command = commands.add_parser("setup-ray", help="make an environment with Ray, which compare then finds")
    command.add_argument(
        "--venv", metavar="DIR", default=str(ray_env.default_folder()), help="where (default %(default)s)"
    )
    command.add_argument("--torch-index", metavar="URL", help="index with a CPU torch; default: as pip is configured")
    command.add_argument("--no-torch", action="store_true", help="leave torch out (the cases with torch then fail)")
    command.set_defaults(run=setup_ray)
    return parser
