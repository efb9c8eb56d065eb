"""Children of os.fork: they end if they return from user code, and the parent's runtime refuses them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from rlinf_actors import UsageError, forks
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.future import Promise

ENDS = [
    ("return 5", 1, "WARNING: process"),
    ("raise KeyError('in the child')", 1, "KeyError: 'in the child'"),
    ("sys.exit(7)", 7, "ends here with exit code 7"),
    ("sys.exit()", 0, "ends here with exit code 0"),
    ("sys.exit('a text')", 1, "a text"),
    ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
]


@pytest.mark.parametrize(("end", "code", "text"), ENDS, ids=[end for end, _, _ in ENDS])
def test_forked_child_that_returns_from_user_code_ends(end, code, text):
    source = f"""
        import os, sys
        from rlinf_actors import forks

        def user_code():
            global child
            child = os.fork()
            if not child:
                print("what the child wrote", end="")
                {end}
            return child

        came_back = forks.guarded("step()", user_code)
        print(os.waitstatus_to_exitcode(os.waitpid(came_back, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == f"what the child wrote{code}\n"
    assert text in done.stderr
    assert "made by os.fork() in step(), came back from there" in done.stderr


def refused_in_child(call) -> str:
    """The text of the UsageError that a forked child gets."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            call()
        except UsageError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def test_forked_child_can_use_only_its_own_works():
    work: Promise[int] = Promise("a get")
    assert "spawn method" in refused_in_child(work.wait)
    done: Promise[int] = Promise("a get")
    done.resolve(1)
    assert refused_in_child(done.wait) == "", "its outcome was there before"

    def own() -> None:
        made: Promise[int] = Promise("a get")
        with pytest.raises(TimeoutError):
            made.wait(0.01)

    assert refused_in_child(own) == ""


def test_forked_child_cannot_use_the_parents_io_thread():
    io = IoThread("asked by a child")

    async def anything() -> None:
        """This coroutine never begins."""

    try:
        assert "spawn method" in refused_in_child(lambda: io.submit(anything()))
        assert io.submit(anything()).result(60) is None
    finally:
        io.stop()


def test_signal_that_reaches_a_new_child_at_once_is_not_the_parents():
    """The end of a pool of multiprocessing sends SIGTERM to children that have just been forked."""
    source = """
        import atexit, os, signal, time
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # before any other function
        from rlinf_actors.worker.main import OrderlyExit

        leaving = OrderlyExit()
        atexit.register(print, "atexit function in", os.getpid())
        child = os.fork()
        if not child:
            time.sleep(600)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, []))
        try:
            print("the parent hears", os.read(leaving._reader, 100))
        except BlockingIOError:
            print("the parent hears nothing", flush=True)
        os._exit(0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"-{int(signal.SIGTERM)} set()\nthe parent hears nothing\n", done.stderr


def test_object_of_an_earlier_fork_generation_is_refused():
    here = forks.generation
    forks.check(here)
    with pytest.raises(UsageError):
        forks.check(here - 1)


def test_worker_may_use_objects_that_its_template_imported():
    local: Promise[int] = Promise("a get")

    def worker() -> None:
        forks.begin()
        with pytest.raises(TimeoutError):
            local.wait(0.01)

    assert refused_in_child(worker) == ""


def test_forked_child_inherits_no_held_lock_and_no_busy_thread():
    """When the process forks, another thread holds a lock and all threads of `then` are busy."""
    source = f"""
        import os, sys, threading
        from rlinf_actors.channel import client
        from rlinf_actors.runtime.then_threads import THEN_THREADS, then_threads

        busy, release = threading.Semaphore(0), threading.Event()

        def work():
            busy.release()
            release.wait()

        for _ in range(THEN_THREADS):
            then_threads.submit(work)
            busy.acquire()
        then_threads.submit(lambda: print("in the parent", os.getpid() == parent, flush=True))
        client._finding.acquire()
        parent, done = os.getpid(), threading.Event()
        child = os.fork()
        if not child:
            then_threads.submit(done.set)
            came = done.wait({60}) and client._finding.acquire(timeout={60})
            os._exit(0 if came else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        release.set()
        sys.exit(code)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "False" not in done.stdout
