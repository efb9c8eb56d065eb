"""The click group of all `rlinf-actors` commands, and the exit code for each error class.

cli.main calls `run`. Every command writes data to stdout and everything else to stderr, and prints an error as one
message without a traceback. The exit codes are agentd's: 64 usage, 69 unavailable, 77 permission, 78 configuration.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from rlinf_actors.cli.output import complain, echo
from rlinf_actors.errors import (
    AuthenticationError,
    ClusterTimeoutError,
    ConfigError,
    PlacementError,
    RlinfActorsError,
    UsageError,
)
from rlinf_actors.exit_codes import CONFIGURATION, FAILURE, INTERRUPTED, NO_PERMISSION, UNAVAILABLE, USAGE
from rlinf_actors.runtime.driver_log import make_harmless
from rlinf_actors.version import VERSION

_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ClusterTimeoutError, UNAVAILABLE),
    (ConfigError, CONFIGURATION),
    (PlacementError, CONFIGURATION),
    (AuthenticationError, NO_PERMISSION),
    (PermissionError, NO_PERMISSION),
    (UsageError, USAGE),
    (RlinfActorsError, FAILURE),
    (OSError, UNAVAILABLE),
)


_COMMANDS = {
    "attach": "attach_command",
    "channel": "channel_command",
    "completion": "completion_command",
    "doctor": "doctor.command",
    "dropin": "dropin_command",
    "events": "events_command",
    "group": "worker_command",
    "groups": "views",
    "head": "head_command",
    "hw": "hw_command",
    "job": "job_command",
    "keys": "keys_command",
    "logs": "logs_command",
    "node": "node_command",
    "nodes": "views",
    "paths": "views",
    "plan": "plan_command",
    "run": "run.command",
    "serve": "serve_command",
    "stack": "stack_command",
    "status": "views",
    "top": "top.command",
    "trace": "trace_command",
    "units": "units_command",
    "worker": "worker_command",
    "workers": "views",
}
"""The module of each command. It is imported when the command runs: together they need most of this package."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*_COMMANDS, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        found = getattr(importlib.import_module(f"rlinf_actors.cli.{_COMMANDS[cmd_name]}"), cmd_name)
        assert isinstance(found, click.Command)
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands by name only: for their help all modules would be imported, which takes half a second."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*map(CompletionItem, names), *click.Command.shell_complete(self, ctx, incomplete)]


class _Estop(click.Command):
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from rlinf_actors.cli.estop import parser

        shown = [action for action in parser()._actions if action.help != argparse.SUPPRESS]
        options = [name for action in shown for name in action.option_strings]
        return [CompletionItem(name) for name in options if name.startswith(incomplete or "--")]


def _today(option: str) -> str:
    """Return the name that an option has today: --job was called --namespace."""
    return "job" if option == "namespace" else option


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _today})
@click.version_option(VERSION, prog_name="rlinf-actors")
def app() -> None:
    """Inspect and manage rlinf-actors clusters."""


@app.command(cls=_Estop, add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def estop(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Stop all robots now. `rlinf-actors estop --help` shows the options."""
    from rlinf_actors.cli.estop import main  # usually cli.main runs it, without click

    context.exit(main(arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line *arguments* of `rlinf-actors`, without the program's name, and return the exit code."""
    make_harmless()
    try:
        code = app.main(list(arguments), prog_name="rlinf-actors", standalone_mode=False)
    except click.ClickException as error:
        said = io.StringIO()  # what was typed may come from a list of names
        error.show(said)
        echo(said.getvalue(), err=True, nl=False)
        return USAGE if isinstance(error, click.UsageError) else error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        return 0  # the reader of our pipe, such as `| head`, has ended
    except tuple(kind for kind, _ in _CODES) as error:
        if isinstance(error, OSError) and error.strerror:
            complain(": ".join(str(part) for part in (error.filename, error.strerror) if part))
            if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                return CONFIGURATION  # as agentd: a restart would fail again
        else:
            complain(str(error))
        return next(code for kind, code in _CODES if isinstance(error, kind))
    return code if isinstance(code, int) else 0  # what a command gave to Context.exit()
