"""Break one core function after the other, and tell whether the quick tests notice: ``python -m tests.mutants``.

Run it by hand, after a change of the core or of its tests. Each mutant is a statement put at the start of one function,
in a copy of the checkout. The quick tests of the directories that know the function then have to fail. The exit code is
1 if a mutant survives, and 2 if a function is not there any more: give the table its new name.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One broken function.

    Attributes:
        package: module that has it, or a directory with that module.
        function: "name" or "Class.name"; one function in *package* has that name.
        statement: put before its first statement; ``{0}`` is its first argument after self, ``{1}`` the second.
        broken: what does not hold any more.
        tests: directories of tests/ that have to notice.
    """

    package: str
    function: str
    statement: str
    broken: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant("rlinf_actors/channel", "ChannelQueue.owner_gone", "return []", "a dead consumer's items return",
           ("channel",)),
    Mutant("rlinf_actors/placement", "_with_local_ranks", "return list({0})", "LOCAL_RANK counts on its node",
           ("placement",)),
    Mutant("rlinf_actors/worker", "Lease.lost", "return False", "a lease that nobody renews is lost", ("worker",)),
    Mutant("rlinf_actors/runtime", "DeadlineTimer.cancel", "return", "a cancelled timer calls nothing", ("runtime",)),
    Mutant("rlinf_actors/messaging", "Window.offer", "return True", "a sender stops when its window is full",
           ("messaging",)),
    Mutant("rlinf_actors/messaging", "Outbox._send", "{0}.settle()", "a send ends when Held comes",
           ("messaging",)),
    Mutant("rlinf_actors/messaging", "CreditAccumulator.taken", "return 0", "a receiver returns credit",
           ("messaging",)),
    Mutant("rlinf_actors/wire/payload.py", "decode", "{0} = AuthenticatedParts({0})", "only members are unpickled",
           ("wire", "security")),
    Mutant("rlinf_actors/net", "pack", "{1} = 0", "a chunk begins where the last one ended", ("net",)),
    Mutant("rlinf_actors/net", "FailureDetector.verdict", "return None", "silence for longer than the lease is an end",
           ("net", "agentd")),
    Mutant("rlinf_actors/head", "_is_failure", "return True", "a worker that ends well is not restarted", ("head",)),
    Mutant("rlinf_actors/head", "ClaimTable.check", "return None", "a robot has one group at a time", ("head",)),
    Mutant("rlinf_actors/head", "Authority.check", "return None", "a member says only what its role may", ("head",)),
    Mutant("agentd", "WorkerTable.end", "{1} = False", "agentd remembers an end until the head knows it", ("agentd",)),
    Mutant("rlinf_actors/messaging", "Mailbox.put_back", "{1}.order = 2**62", "a message put back keeps its place",
           ("messaging",)),
    Mutant("rlinf_actors/group", "RemoteMethod._peers", "return self._control.group.peers",
           "a call of a view goes to its ranks only", ("group",)),
)  # fmt: skip


def functions(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module and the methods of its classes, by name."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        for one, prefix in [(node, "")] + [(item, f"{node.name}.") for item in getattr(node, "body", []) if
                                           isinstance(node, ast.ClassDef)]:  # fmt: skip
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + one.name] = one
    return found


def find(mutant: Mutant, root: Path) -> tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the function's module and definition.

    Raises:
        LookupError: no function, or several, of *mutant*'s package have its name.
    """
    place = root / mutant.package
    modules = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    found = [(path, every[mutant.function]) for path in modules if mutant.function in (every := functions(path))]
    if len(found) != 1:
        where = ", ".join(str(path.relative_to(root)) for path, _ in found) or "nowhere"
        raise LookupError(f"{mutant.package} has to have one {mutant.function}(); it is in: {where}")
    return found[0]


def mutated(mutant: Mutant, path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the module's source with the function broken."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args) if one.arg != "self"]
    documented = ast.get_docstring(function, clean=False) is not None
    first = function.body[1 if documented else 0]
    lines = path.read_text().splitlines(keepends=True)
    lines.insert(first.lineno - 1, " " * first.col_offset + mutant.statement.format(*names) + "\n")
    return "".join(lines)


def quick(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run the quick tests of some directories in the copy, up to the first that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "quick", "--timeout", "30",
         *(f"tests/{name}" for name in tests)],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants of functions whose name has this in it")
    parser.add_argument("--list", action="store_true", help="find the functions, and run nothing")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.function]
    lost, survived = 0, 0
    with tempfile.TemporaryDirectory(prefix="rlinf-mutants-") as folder:
        copy = Path(folder, "copy")
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in filter(lambda name: (ROOT / name).is_file(), listed.splitlines()):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        for mutant in chosen:
            try:
                path, function = find(mutant, copy)
            except LookupError as error:
                lost += 1
                print(f"LOST      {error}", flush=True)
                continue
            where = f"{path.relative_to(copy)}: {mutant.function}"
            if options.list:
                print(f"found     {where}")
                continue
            before = path.read_text()
            path.write_text(mutated(mutant, path, function))
            begun = time.monotonic()
            code, output = quick(copy, mutant.tests)
            path.write_text(before)
            caught = code == 1
            survived += not caught
            by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), output[-2000:])
            seconds = time.monotonic() - begun
            print(
                f"{'caught' if caught else 'SURVIVED':9} {where}: {mutant.broken} ({seconds:.0f} s)\n          {by}",
                flush=True,
            )
    print(f"{len(chosen)} mutants, {survived} survived, {lost} not found")
    return 2 if lost else int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
