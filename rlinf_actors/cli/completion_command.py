"""`rlinf-actors completion`: a script that makes a shell complete commands and options.

The script asks `rlinf-actors` itself on each tab, by the variable _RLINF_ACTORS_COMPLETE, so it does not get old.
"""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from rlinf_actors.cli.output import echo, note

VARIABLE = "_RLINF_ACTORS_COMPLETE"
_FILES = {
    "bash": "~/.local/share/bash-completion/completions/rlinf-actors",
    "zsh": '"${fpath[1]}/_rlinf-actors"',
    "fish": "~/.config/fish/completions/rlinf-actors.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(tuple(_FILES)))
def completion(shell: str) -> None:
    """Print a script by which SHELL completes the commands and options of rlinf-actors.

    For this shell alone: eval "$(rlinf-actors completion bash)" (fish: rlinf-actors completion fish | source).
    """
    found = get_completion_class(shell)
    assert found is not None
    made = found(click.Group(), {}, "rlinf-actors", VARIABLE)
    # not made.source(), which for bash starts a bash to ask for its version
    echo(made.source_template % made.source_vars())
    if sys.stdout.isatty():
        note(f"to keep it: rlinf-actors completion {shell} > {_FILES[shell]}")
