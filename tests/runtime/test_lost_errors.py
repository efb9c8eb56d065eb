"""Errors that nobody looked at: said in the log, and in the exit code unless the script chose one."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest

from rlinf_actors.runtime.lost import LostErrors


class Result:
    def describe(self):
        return "step(): ValueError: boom"


def test_seen_errors_are_not_lost(caplog):
    lost = LostErrors(change_exit_code=False)
    result = Result()
    lost.failed(result)
    lost.seen(result)
    lost.close()
    assert lost.count == 0
    assert caplog.text == ""


def test_unseen_ones_are_logged_when_they_go_and_at_the_end(caplog):
    lost = LostErrors(change_exit_code=False)
    one, two = Result(), Result()
    lost.failed(one)
    lost.failed(two)
    with caplog.at_level(logging.ERROR):
        lost.collected(one)
        del one
        lost.close()
        lost.close()
    assert lost.count == 2
    assert caplog.text.count("step(): ValueError: boom") == 2
    assert "wait() or await" in caplog.text


SCRIPT = """
    import atexit, sys, threading
    before, hook = sys.exit, sys.excepthook
    from rlinf_actors.runtime.lost import LostErrors
    atexit.register(lambda: print("atexit ran"))

    class Result:
        def describe(self): return "step(): boom"

    lost = LostErrors(change_exit_code={change})

    def lose():
        result = Result()
        lost.failed(result)
        lost.close()
    {body}
"""


@pytest.mark.parametrize(
    ("body", "change", "code"),
    [
        ("lose()", True, 1),
        ("lose()", False, 0),
        ("pass", True, 0),
        ("lose(); sys.exit(3)", True, 3),
        ("lose(); sys.exit(0)", True, 1),
        ("lose(); sys.exit()", True, 1),
        ("lose(); sys.exit('text')", True, 1),
        ("lose(); raise SystemExit(4)", True, 1),
        ("threading.Thread(target=sys.exit, args=(3,)).start(); lose()", True, 1),
        ("lost.close(); assert sys.exit is before and sys.excepthook is hook", True, 0),
        ("lose(); raise ValueError", True, 1),
        ("atexit.register(lose)", True, 1),
        ("lose(); lose(); sys.exit(5)", True, 5),
    ],
)
def test_exit_codes(body, change, code):
    script = textwrap.dedent(SCRIPT).format(change=change, body=textwrap.dedent(body))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "atexit ran" in done.stdout  # also what was registered before
