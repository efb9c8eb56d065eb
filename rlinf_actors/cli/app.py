"""The click group of all `rlinf-actors` commands, and the exit code for each error class.

cli.main calls `run`. Every command writes data to stdout and everything else to stderr, and prints an error as one
message without a traceback. The exit codes are agentd's: 64 usage, 69 unavailable, 77 permission, 78 configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from rlinf_actors.cli import (
    doctor,
    dropin_command,
    events_command,
    head_command,
    hw_command,
    keys_command,
    node_command,
    plan_command,
    views,
)
from rlinf_actors.cli.output import complain, note
from rlinf_actors.errors import (
    AuthenticationError,
    ClusterTimeoutError,
    ConfigError,
    PlacementError,
    RlinfActorsError,
    UsageError,
)
from rlinf_actors.systemd import unit_files as files
from rlinf_actors.version import VERSION

_NAMES = (*files.UNITS, *files.DROP_INS)


@click.group()
def units() -> None:
    """Show or install systemd units for the head and for agentd."""


@units.command("print")
@click.argument("names", nargs=-1, type=click.Choice(_NAMES), metavar="[NAME]...")
def print_units(names: tuple[str, ...]) -> None:
    """Print units with the paths of this installation.

    Units: rlinf-head.service, rlinf-agentd@.service, rlinf-workers@.service, and the drop-ins of the last two,
    rlinf-agentd@.service.d/hardened.conf and rlinf-workers@.service.d/hardened.conf. Default: all.
    """
    chosen = names or _NAMES
    for name in chosen:
        if len(chosen) > 1:
            click.echo(f"# --- {name}")
        click.echo(files.text(name), nl=False)


@units.command("install")
@click.option("--dir", "directory", default=files.DIRECTORY, show_default=True, help="Directory to write the units to.")
@click.option(
    "--hardened",
    is_flag=True,
    help="Also write the drop-ins that restrict nodes; each says what workers cannot do then.",
)
@click.option("--force", is_flag=True, help="Overwrite files that were changed by hand.")
def install(directory: str, hardened: bool, force: bool) -> None:
    """Write the units into a directory, and print the commands that enable the units. A file that was changed by hand
    is not overwritten without --force.
    """
    names = _NAMES if hardened else files.UNITS
    steps = files.plan(Path(directory), names, force)
    files.carry_out(steps)
    for step in steps:
        click.echo(f"{step.what}: {step.path}")
    note(
        "then, as root:\n"
        "  systemctl daemon-reload\n"
        "  systemctl enable --now rlinf-agentd@USER    # on each node; USER runs the workers\n"
        "  useradd --system --no-create-home --shell /usr/sbin/nologin rlinf-head    # on the head's node, once\n"
        "  systemctl enable --now rlinf-head           # where the head runs without an agentd"
    )


USAGE, UNAVAILABLE, PERMISSION, CONFIG, INTERRUPTED = 64, 69, 77, 78, 130

_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ClusterTimeoutError, UNAVAILABLE),
    (ConfigError, CONFIG),
    (PlacementError, CONFIG),
    (AuthenticationError, PERMISSION),
    (PermissionError, PERMISSION),
    (UsageError, USAGE),
    (RlinfActorsError, 1),
    (OSError, UNAVAILABLE),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="rlinf-actors")
def app() -> None:
    """Inspect and manage rlinf-actors clusters."""


for _command in (
    head_command.head,
    views.status,
    node_command.node,
    views.nodes,
    views.groups,
    views.workers,
    plan_command.plan,
    views.paths,
    hw_command.hw,
    doctor.doctor,
    dropin_command.dropin,
    events_command.events,
    keys_command.keys,
    units,
):
    app.add_command(_command)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def estop(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Stop all robots now. `rlinf-actors estop --help` shows the options."""
    from rlinf_actors.cli.estop import main  # usually cli.main runs it, without click

    context.exit(main(arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line *arguments* of `rlinf-actors`, without the program's name, and return the exit code."""
    try:
        code = app.main(list(arguments), prog_name="rlinf-actors", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        return USAGE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        return 0  # the reader of our pipe, such as `| head`, has ended
    except tuple(kind for kind, _ in _CODES) as error:
        complain(str(error))
        return next(code for kind, code in _CODES if isinstance(error, kind))
    return code if isinstance(code, int) else 0  # what a command gave to Context.exit()
