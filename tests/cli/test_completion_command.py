"""The scripts of `rlinf-actors completion`: the one for bash in a real bash, those for zsh and fish where they are."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from rlinf_actors.cli import app

COMPLETE = """
eval "$(rlinf-actors completion bash)"
COMP_WORDS=({words} "{word}"); COMP_CWORD={index}; COMP_LINE="{words} {word}"
$(complete -p rlinf-actors | sed -E "s/.* -F ([^ ]+) .*/\\1/") rlinf-actors "{word}" ""
printf "%s\\n" "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`rlinf-actors` on the PATH."""
    script = tmp_path / "rlinf-actors"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlinf_actors.cli.main "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("words", "word", "some"),
    [
        ("rlinf-actors", "no", {"node", "nodes"}),
        ("rlinf-actors keys", "re", {"revoke"}),
        ("rlinf-actors doctor", "--", {"--json", "--head", "--paths", "--bundle"}),
        ("rlinf-actors estop", "--re", {"--reason", "--release"}),
        ("rlinf-actors completion", "z", {"zsh"}),
    ],
)
def test_bash_completes_commands_options_and_values(program, words, word, some):
    script = COMPLETE.format(words=words, word=word, index=len(words.split()))
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert done.stderr == ""
    assert some <= found
    assert all(one.startswith(word) for one in found)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_accepted_by_them(shell, capsys):
    assert app.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_RLINF_ACTORS_COMPLETE" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script was made, and not run")
    subprocess.run([shell, "--no-execute"], input=script, text=True, check=True)
