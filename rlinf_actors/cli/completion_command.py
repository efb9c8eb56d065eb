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


_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' words=() word last="" before="" response completion type value
    # bash splits words at colons, of which GROUP:RANK and HOST:PORT have one
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        if [[ ${#words[@]} -gt 0 && ( $word == :* || $last == *: ) ]]; then
            words[${#words[@]}-1]+=$word
        else
            words+=("$word")
        fi
        last=$word
    done
    word=${words[${#words[@]}-1]}
    last=${word##*:}
    [[ $COMP_WORDBREAKS == *:* ]] && before=${word:0:${#word}-${#last}}
    response=$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete $1)
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        case $type in
            dir) COMPREPLY=(); compopt -o dirnames ;;
            file) COMPREPLY=(); compopt -o default ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
"""As the script of click, which knows no words with colons."""


@click.command()
@click.argument("shell", type=click.Choice(tuple(_FILES)))
def completion(shell: str) -> None:
    """Print a script by which SHELL completes the commands and options of rlinf-actors, and the names of groups,
    workers, jobs and nodes of a running cluster.

    For this shell alone: eval "$(rlinf-actors completion bash)" (fish: rlinf-actors completion fish | source).
    """
    found = get_completion_class(shell)
    assert found is not None
    made = found(click.Group(), {}, "rlinf-actors", VARIABLE)
    # not made.source(), which for bash starts a bash to ask for its version
    echo((_BASH if shell == "bash" else made.source_template) % made.source_vars())
    if sys.stdout.isatty():
        note(f"to keep it: rlinf-actors completion {shell} > {_FILES[shell]}")
