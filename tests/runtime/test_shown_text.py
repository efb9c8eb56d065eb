"""Control characters in text of other processes are shown as escapes, on terminals and in logs."""

import io
import json
import logging

import pytest

from rlinf_actors import shown
from rlinf_actors.cli.output import json_line, plain
from rlinf_actors.errors import ConfigError, NameInUseError, WorkerError
from rlinf_actors.runtime.log_printer import LogPrinter, say
from rlinf_actors.systemd.service_manager import DaemonStderr
from rlinf_actors.wire.agent_messages import LogLines

CLEAR = "\x1b[2J\x1b]0;title\x07\x9b2J\x7f\u202e"
"""Clears a terminal, sets its title, and turns the direction of the text around."""


def unsafe(text):
    return [c for c in text if not c.isprintable() and c not in "\n\t"]


def printed(monkeypatch, entries, node="n1", raw=False):
    """Return what the driver's terminal gets for the *entries* of a LogLines."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    printer = LogPrinter(lambda credit: None, raw)
    printer.show(LogLines("d1", node, entries))
    printer.close()
    return out.getvalue()


def test_output_of_workers_keeps_tabs_and_colours_only(monkeypatch):
    text = printed(monkeypatch, [("g:0", "out", f"a\t\x1b[31mred\x1b[0m é\xa0█ {CLEAR}")])
    assert text == ("[g:0@n1] a\t\x1b[31mred\x1b[0m é\xa0█ \\x1b[2J\\x1b]0;title\\x07\\x9b2J\\x7f\\u202e\x1b[0m\n")
    assert not unsafe(printed(monkeypatch, [("g:0", "out", CLEAR), ("g:0", "out", f"\x1b[1m 5 %{CLEAR}\r")]))


def test_prefix_of_workers_output_is_printable(monkeypatch):
    text = printed(monkeypatch, [(f"g{CLEAR}:0", "out", "hello")], node=f"n{CLEAR}\n")
    assert not unsafe(text)
    assert text.count("\n") == 1


def test_raw_output_passes_lines_but_no_prefixes(monkeypatch):
    assert printed(monkeypatch, [("g:0", "out", CLEAR)], raw=True) == f"[g:0@n1] {CLEAR}\n"
    assert CLEAR not in printed(monkeypatch, [(f"g{CLEAR}:0", "out", "x")], raw=True)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError(CLEAR, worker=f"g{CLEAR}:0", node="n", remote_traceback=f"Traceback\n\tx {CLEAR}"),
        NameInUseError(f"a\n{CLEAR}"),
        ConfigError(f"is {CLEAR}", path=f"file{CLEAR}"),
    ],
)
def test_texts_of_errors_are_harmless_and_their_arguments_unchanged(error):
    assert not unsafe(str(error))
    assert CLEAR in str(error.args) or CLEAR in "".join(map(str, error.args))


def test_output_of_commands_is_harmless(capsys):
    assert not unsafe(plain(CLEAR))
    data = {"a": CLEAR, "b": ["é█\xa0"]}
    text = json_line(data, 2)
    assert (unsafe(text.replace("\xa0", "")), json.loads(text)) == ([], data)
    say(f"left out at {CLEAR}")
    assert not unsafe(capsys.readouterr().err)


def test_logs_of_daemons_are_harmless_and_entries_cannot_be_forged(tmp_path):
    path = tmp_path / "log"
    with open(path, "w") as stream:
        handler = logging.StreamHandler(stream)
        daemon = DaemonStderr("agentd", stream, "")
        daemon.say(f"ended: {CLEAR}")
        handler.setFormatter(daemon.formatter())
        record = logging.LogRecord("x", logging.INFO, "", 1, "%s", (f"{CLEAR}\nagentd: forged",), None)
        handler.emit(record)
        try:
            raise ValueError(CLEAR)
        except ValueError as error:
            record = logging.LogRecord("x", logging.INFO, "", 1, "failed", (), (ValueError, error, None))
        handler.emit(record)
    text = path.read_text()
    assert not unsafe(text)
    assert not any(line.startswith("agentd: forged") for line in text.splitlines())


@pytest.mark.parametrize("text", ["", "plain", "a\tb", "é\u200d👩\u200d💻", "\x1b[38;5;1m"])
def test_usual_output_stays_as_it_is(text):
    assert shown.output(text).removesuffix(shown.RESET) == text
