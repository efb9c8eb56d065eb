"""The scripts of `rlinf-actors completion`: the one for bash in a real bash, those for zsh and fish where they are."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from cli_kit import tab

from rlinf_actors.cli import app


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
    found = set(tab(*words.split(), word))
    assert some <= found
    assert all(one.startswith(word) for one in found)


def test_nothing_is_said_where_no_head_answers(program, monkeypatch):
    monkeypatch.setenv("RLINF_HEAD", "127.0.0.1:1")
    assert tab("rlinf-actors", "worker", "show", "") == []
    assert tab("rlinf-actors", "logs", "--head", "127.0.0.1", ":", "1", "--job-") == ["--job-id"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_accepted_by_them(shell, capsys):
    assert app.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_RLINF_ACTORS_COMPLETE" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script was made, and not run")
    subprocess.run([shell, "--no-execute"], input=script, text=True, check=True)
