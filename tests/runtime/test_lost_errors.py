"""Unseen errors: logged, and in the exit code unless the script chose one."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable

import pytest

from rlinf_actors.runtime.lost_errors import GRACE_S, LOOP_PATIENCE_S, LostErrors

pytestmark = pytest.mark.slow


class Result:
    """A failed call. `loop` is None if the call was made without an event loop."""

    cause = None
    loop = None
    shared = False

    def __init__(self, text="step(): ValueError: boom"):
        self.text = text

    def describe(self):
        return self.text

    def raised(self):
        return ValueError(self.text)


class Ready(Result):
    """A group that could not start."""

    shared = True


class Clock:
    """Timers that run when the test calls `run`."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], object]]] = []

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        self.due.append((seconds, function))

    def run(self, up_to: float = GRACE_S) -> None:
        for seconds, function in list(self.due):
            if seconds <= up_to:
                self.due.remove((seconds, function))
                function()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lost(clock, caplog):
    caplog.set_level(logging.ERROR)
    return LostErrors(False, clock.later)


def test_error_that_is_seen_in_time_is_not_logged(lost, clock, caplog):
    result = Result()
    lost.failed(result, awaited=False)
    lost.seen(result)
    clock.run()
    lost.close()
    assert lost.count == 0
    assert caplog.text == ""


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("parts:1 on n1 raised ValueError: 17\nTraceback"), "its script failed: ValueError: parts:1 on n1 "),
        (KeyError(), "its script failed: KeyError"),
        (ValueError("\n\x1b[2J" + "x" * 1000), "its script failed: ValueError: \\x1b[2Jxxx"),
        (Unspeakable(), "its script failed: Unspeakable"),
        (SystemExit(3), "its script exited with code 3"),
        (SystemExit("no\nrobot"), "its script exited with 'no\\nrobot'"),
        (SystemExit("x" * 1000), "its script exited with 'xx"),
        (SystemExit(0), "the process ends"),
        (SystemExit(), "the process ends"),
        (asyncio.CancelledError(), "its script was cancelled (Ctrl-C, or"),
        (KeyboardInterrupt(), "its script was interrupted (Ctrl-C)"),
        (None, "the process ends"),
    ],
)
def test_the_farewell_says_in_one_line_how_the_script_failed(lost, error, said):
    lost.script_raised(error)
    lost.close()
    assert lost.farewell.startswith(said)
    assert lost.farewell.isprintable()
    assert len(lost.farewell) < 600


def test_the_farewell_counts_failed_calls_that_were_never_awaited(lost):
    lost.failed(Result(), awaited=False)
    lost.close()
    assert lost.farewell == "the process ends; 1 failed call was never awaited"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ValueError('boom')", "its script failed: ValueError: boom"),
        ("sys.exit(4)", "its script exited with code 4"),
        ("sys.exit()", "the process ends"),
    ],
)
def test_the_farewell_knows_how_a_script_without_a_with_block_ends(code, said):
    script = f"""
        import atexit, sys
        from rlinf_actors.runtime.lost_errors import LostErrors
        lost = LostErrors(True, lambda *_: None)
        atexit.register(lambda: (lost.close(), print(lost.farewell)))
        {code}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == said


def test_seen_error_is_kept_no_longer(lost):
    """Its traceback has the caller's frames, whose locals may be large."""
    result = Result()
    lost.failed(result, awaited=False)
    lost.seen(result)
    kept = weakref.ref(result)
    del result
    assert kept() is None


def test_unseen_error_is_logged_once(lost, clock, caplog):
    result = Result()
    lost.failed(result, awaited=False)
    assert caplog.text == ""
    clock.run()
    assert caplog.text.count("step(): ValueError: boom") == 1
    assert "wait() or await" in caplog.text
    lost.collected(result)
    lost.close()
    lost.close()
    assert caplog.text.count("step(): ValueError: boom") == 1
    assert lost.count == 1


def test_unseen_error_of_a_collected_result_is_logged(lost, clock, caplog):
    lost.failed(Result(), awaited=False)
    gc.collect()
    clock.run()
    assert caplog.text.count("boom") == 1


def test_error_of_an_awaited_call_is_logged_only_if_the_result_is_dropped(lost, clock, caplog):
    kept, dropped = Result("kept"), Result("dropped")
    lost.failed(kept, awaited=True)
    lost.failed(dropped, awaited=True)
    assert clock.due == []
    lost.collected(dropped)
    assert "dropped" in caplog.text
    assert "kept" not in caplog.text


def test_close_reports_errors_that_are_still_in_their_grace(lost, caplog):
    result = Result()
    lost.failed(result, awaited=False)
    lost.close()
    assert caplog.text.count("boom") == 1


def test_calls_that_failed_by_one_error_are_one_report(lost, clock, caplog):
    one, two = Result(), Result()
    one.cause = two.cause = RuntimeError("the worker died")
    lost.failed(one, awaited=False)
    lost.failed(two, awaited=False)
    clock.run()
    assert lost.count == 1


@pytest.mark.parametrize("awaited", [True, False])
def test_error_of_a_group_is_seen_if_a_call_raised_it(lost, clock, caplog, awaited):
    ready, call = Ready(), Result()
    ready.cause = call.cause = RuntimeError("the constructor raised")
    lost.failed(ready, awaited=False)
    lost.failed(call, awaited=awaited)
    if not awaited:
        lost.seen(call)
    clock.run()
    lost.close()
    assert caplog.text.count("boom") == (0 if not awaited else 1)  # the wait that did not take the error, at the end


class TestLoops:
    """Errors of calls that were made in an event loop."""

    async def test_loops_exception_handler_gets_the_error(self, lost, clock, caplog):
        loop, contexts, came = asyncio.get_running_loop(), [], asyncio.Event()
        loop.set_exception_handler(lambda _, context: (contexts.append(context), came.set()))
        result = Result()
        result.loop = loop
        lost.failed(result, awaited=False)
        clock.run()
        await came.wait()
        clock.run(LOOP_PATIENCE_S)
        assert [str(context["exception"]) for context in contexts] == ["step(): ValueError: boom"]
        assert contexts[0]["future"] is result
        assert caplog.text == ""

    async def test_error_is_logged_if_its_loop_is_blocked(self, lost, clock, caplog):
        loop, contexts = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: contexts.append(context))
        result = Result()
        result.loop = loop
        lost.failed(result, awaited=False)
        clock.run()
        clock.run(LOOP_PATIENCE_S)  # before the loop gets a turn
        await asyncio.sleep(0)
        assert caplog.text.count("boom") == 1
        assert contexts == []

    async def test_close_logs_an_error_once_that_its_loop_did_not_take(self, lost, clock, caplog):
        result = Result()
        result.loop = asyncio.get_running_loop()
        lost.failed(result, awaited=False)
        lost.close()
        lost.close()
        assert caplog.text.count("boom") == 1

    def test_error_is_logged_if_its_loop_has_ended(self, lost, clock, caplog):
        result = Result()
        result.loop = asyncio.new_event_loop()
        result.loop.close()
        lost.failed(result, awaited=False)
        clock.run()
        assert caplog.text.count("boom") == 1


SCRIPT = """
    import atexit, sys, threading
    before, hook = sys.exit, sys.excepthook
    from rlinf_actors.runtime.lost_errors import LostErrors
    atexit.register(lambda: print("atexit ran"))

    class Result:
        cause = loop = None
        shared = False
        def describe(self): return "step(): boom"

    lost = LostErrors({change}, lambda seconds, function: None)

    def lose():
        result = Result()
        lost.failed(result, awaited=False)
        lost.close()

    def lose_late():
        "Reported, and awaited afterwards."
        result = Result()
        lost._later = lambda seconds, function: function()
        lost.failed(result, awaited=False)
        lost.seen(result)
        lost.close()
    {body}
"""


@pytest.mark.parametrize(
    ("body", "change", "code"),
    [
        ("lose()", True, 1),
        ("lose()", False, 0),
        ("pass", True, 0),
        ("lose_late()", True, 0),
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
def test_exit_code_is_1_after_unseen_errors_unless_the_script_chose_one(body, change, code):
    script = textwrap.dedent(SCRIPT).format(change=change, body=textwrap.dedent(body))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "atexit ran" in done.stdout  # includes functions registered before


RUNTIME = """
    from rlinf_actors.runtime.runtime import Runtime

    def lose():
        class Failed:
            cause = loop = None
            shared = False
            describe = raised = lambda self: "boom"
        runtime = Runtime("driver", "ns")
        runtime.lost.failed(Failed(), awaited=False)
        runtime.close()

    {begin}
"""


def exit_code(tmp_path, begin):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RUNTIME).format(begin=begin))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    return done.returncode


def test_a_script_that_only_imports_pytest_exits_with_1(tmp_path):
    assert exit_code(tmp_path, "import pytest, rlinf_actors.testing.pytest_plugin; lose()") == 1


def test_a_run_of_pytest_keeps_its_exit_code(tmp_path):
    test = "import __main__\n\ndef test_it(caplog):\n    __main__.lose()\n    assert 'boom' in caplog.text\n"
    (tmp_path / "test_it.py").write_text(test)
    run = f"import pytest; assert pytest.main(['-s', '-p', 'no:cacheprovider', {str(tmp_path)!r}]) == 0"
    assert exit_code(tmp_path, run) == 0


def test_script_that_has_run_pytest_exits_with_1_after_unseen_errors(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    assert exit_code(tmp_path, f"import pytest; pytest.main([{str(tmp_path)!r}]); lose()") == 1


class TestDriverEnds:
    """With RLINF_ACTORS_LOST_ERRORS=end."""

    def test_first_report_ends_the_driver_with_the_error_in_full(self, clock, caplog):
        ended = []
        lost = LostErrors(False, clock.later, lambda: ended.append(caplog.text))
        results = [Result("one"), Result("two")]
        for result in results:
            lost.failed(result, awaited=False)
        assert not ended
        clock.run()
        assert len(ended) == 1
        assert "one" in ended[0]
        assert "RLINF_ACTORS_LOST_ERRORS=exit-code" in ended[0]
        assert "two" in caplog.text

    def test_driver_does_not_end_by_errors_that_are_seen_or_reported_at_the_end(self, clock, caplog):
        ended = []
        lost = LostErrors(False, clock.later, lambda: ended.append(1))
        seen, late = Result("seen"), Result("late")
        lost.failed(seen, awaited=False)
        lost.seen(seen)
        clock.run()
        lost.failed(late, awaited=False)
        lost.close()
        assert not ended
        assert "late" in caplog.text

    def test_calls_that_fail_because_the_driver_ends_are_not_reported(self, lost, clock, caplog):
        result = Result("ended")
        result.cause = RuntimeError("the driver ends")
        lost.expected(result.cause)
        lost.failed(result, awaited=False)
        clock.run()
        assert caplog.text == ""


INTERRUPTED = """
    import sys, threading
    from rlinf_actors.runtime import driver_end
    {prepare}
    failed = threading.Event()
    later = lambda seconds, function: None
    end = driver_end.DriverEnd(failed.set, later)
    threading.Thread(target=end.begin).start()
    {wait}
    print("went on")
"""


@pytest.mark.parametrize(
    ("prepare", "wait", "code", "out"),
    [
        ("driver_end.prepare()", "threading.Lock().__enter__(); threading.Event().wait()", 1, ""),
        ("driver_end.prepare()", "import asyncio; asyncio.run(asyncio.sleep(3600))", 1, ""),
        ("driver_end.prepare()", "import time; time.sleep(3600)", 1, ""),
        ("driver_end.prepare()", "while True: pass", 1, ""),
        ("threading.Thread(target=driver_end.prepare).start()", "failed.wait()", 0, "went on\n"),
    ],
)
def test_main_thread_is_interrupted_wherever_it_waits(prepare, wait, code, out):
    source = textwrap.dedent(INTERRUPTED).format(prepare=prepare, wait=wait)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (code, out), done.stderr
