"""The commands under one name, and what becomes of their errors.

House rules: data goes to stdout, everything else to stderr; an error is shown as its message, never
as a traceback of ours; exit codes are agentd's: 64 usage, 69 unavailable, 77 permission, 78 configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from rlinf_actors.cli import (
    doctor,
    events_command,
    head_command,
    hw_command,
    keys_command,
    node_command,
    plan_command,
    units_command,
    views,
)
from rlinf_actors.cli.output import complain
from rlinf_actors.errors import (
    AuthenticationError,
    ClusterTimeoutError,
    ConfigError,
    PlacementError,
    RlinfActorsError,
    UsageError,
)
from rlinf_actors.version import VERSION

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
    """Look at clusters and configurations of rlinf-actors."""


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
    events_command.events,
    keys_command.keys,
    units_command.units,
):
    app.add_command(_command)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def estop(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Stop all robots, now; see `rlinf-actors estop --help`."""
    from rlinf_actors.cli.estop import main  # usually cli.main runs it, without click

    context.exit(main(arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
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
        return 0  # `rlinf-actors workers | head` has what it wants
    except tuple(kind for kind, _ in _CODES) as error:
        complain(str(error))
        return next(code for kind, code in _CODES if isinstance(error, kind))
    return code if isinstance(code, int) else 0  # what a command gave to Context.exit()
