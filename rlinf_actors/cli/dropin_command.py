"""`rlinf-actors dropin`: run a program of RLinf on rlinf_actors, and list the names it uses that are not served."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import click

from rlinf_actors.cli.output import echo, note
from rlinf_actors.dropin import door
from rlinf_actors.dropin.check import check, python_files
from rlinf_actors.errors import UsageError
from rlinf_actors.plurals import counted

PTH = "rlinf_actors_dropin.pth"
LINE = (
    f'import os, sys; os.environ.get("{door.DROPIN}") == "1" and (sys.path.insert(0, {str(door.SITE)!r}), '
    f'__import__("rlinf_actors_gate").set_up(), sys.path.remove({str(door.SITE)!r}))\n'
)
"""Line of the .pth file. Python runs it at each start: without the variable it only looks that up."""


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.option(
    "--install", "change", flag_value="install", help="Let RLINF_ACTORS_DROPIN=1 serve rlinf.scheduler in this Python."
)
@click.option("--uninstall", "change", flag_value="uninstall", help="Undo --install.")
@click.option(
    "--check",
    "checked",
    type=click.Path(exists=True, path_type=Path),
    help="List what the Python files of a program use of rlinf.scheduler and ray that is not served; run nothing. "
    "Exit code 1 if there is any.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND]...")
def dropin(change: str | None, checked: Path | None, command: tuple[str, ...]) -> None:
    """Run COMMAND, such as 'python train.py', with rlinf.scheduler served by rlinf_actors instead of RLinf on Ray.

    Its workers, and the processes that it starts, are served too. RLinf's checkout is not changed.
    """
    if (change is not None) + (checked is not None) + bool(command) != 1:
        raise UsageError(
            "dropin needs a command, --check, --install or --uninstall: rlinf-actors dropin -- python train.py"
        )
    if checked is not None:
        _check(checked)
    elif change == "install":
        _pth().write_text(LINE)
        note(f"wrote {_pth()}: with {door.DROPIN}=1 this Python serves rlinf.scheduler from rlinf_actors")
    elif change == "uninstall":
        try:
            _pth().unlink()
        except FileNotFoundError:
            note(f"there is no {_pth()}")
        else:
            note(f"removed {_pth()}")
    else:
        env = {**os.environ, **door.environment(os.environ.get("PYTHONPATH", ""))}
        try:
            os.execvpe(command[0], list(command), env)
        except FileNotFoundError:
            raise UsageError(f"{command[0]!r} is not a program on PATH") from None


def _check(path: Path) -> None:
    findings = check(path)
    for finding in findings:
        echo(finding)
    hit = len({finding.path for finding in findings})
    names, files = counted(len(findings), "name"), counted(len(python_files(path)), "Python file")
    note(f"not served: {names}, in {hit} of {files}")
    click.get_current_context().exit(1 if findings else 0)


def _pth() -> Path:
    return Path(sysconfig.get_path("purelib")) / PTH
