"""Children by os.fork: how they end when they come back from user code, and what they are refused."""

from __future__ import annotations

import os
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
def test_a_child_that_comes_back_ends(end, code, text):
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
    """What UsageError says to a forked child."""
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


def test_a_work_of_the_parent_is_refused_and_one_of_the_child_is_not():
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


def test_what_is_asked_of_the_parents_io_thread_is_refused():
    io = IoThread("asked by a child")

    async def anything() -> None:
        """Never begun."""

    try:
        assert "spawn method" in refused_in_child(lambda: io.submit(anything()))
        assert io.submit(anything()).result(60) is None
    finally:
        io.stop()


def test_generations_count_forks():
    here = forks.generation()
    forks.check(here)
    with pytest.raises(UsageError):
        forks.check(here - 1)


def test_what_a_template_imported_is_its_workers_own():
    local: Promise[int] = Promise("a get")

    def worker() -> None:
        forks.begin()
        with pytest.raises(TimeoutError):
            local.wait(0.01)

    assert refused_in_child(worker) == ""


def test_locks_and_threads_of_the_process_are_free_in_a_child():
    """Another thread holds a lock, and all threads of `then` are busy, when the process forks."""
    source = f"""
        import os, sys, threading
        from rlinf_actors.channel import client
        from rlinf_actors.runtime import future as asyncwork

        busy, release = threading.Semaphore(0), threading.Event()

        def work():
            busy.release()
            release.wait()

        for _ in range(asyncwork.THEN_THREADS):
            asyncwork._threads.submit(work)
            busy.acquire()
        asyncwork._threads.submit(lambda: print("in the parent", os.getpid() == parent, flush=True))
        client._finding.acquire()
        parent, done = os.getpid(), threading.Event()
        child = os.fork()
        if not child:
            asyncwork._threads.submit(done.set)
            came = done.wait({60}) and client._finding.acquire(timeout={60})
            os._exit(0 if came else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        release.set()
        sys.exit(code)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "False" not in done.stdout
