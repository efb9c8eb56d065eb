"""A robot worker's lease, with a clock in hand; and how its threads are brought to a standstill, in real ones."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pace
import pytest

from rlinf_actors.worker.leasepage import Lease, LeasePageWriter


def test_there_is_time_left_to_stop():
    lease = Lease(until=102.0, lease_s=2.0)
    assert lease.end == pytest.approx(101.6)
    assert lease.no_word(101.6).endswith("for 1.6 s")


def test_an_older_renewal_changes_nothing():
    lease = Lease(until=102.0, lease_s=2.0)
    lease.renew(103.0)
    lease.renew(102.5)
    assert lease.until == 103.0


def test_lease_is_lost_after_its_last_moment_and_not_before():
    lease = Lease(until=102.0, lease_s=2.0)
    assert lease.last_moment == pytest.approx(101.75)
    assert lease.end < 101.7  # time to stop, unless a renewal waits to be read
    assert not lease.lost(101.7)
    assert lease.lost(101.75)


def test_a_lease_page_moves_forward_and_stays_lost():
    writer = LeasePageWriter(time.monotonic_ns() + 60 * 10**9)
    page, first = writer.page, writer.page.deadline_ns
    writer.renew(first - 1)
    assert page.held()
    assert page.deadline_ns == first
    writer.renew(first + 5)
    assert page.deadline_ns == first + 5
    writer.lose()
    writer.renew(first + 10)
    assert page.deadline_ns == 0
    assert not page.held()


def test_a_lease_page_runs_out_without_its_writer():
    assert not LeasePageWriter(time.monotonic_ns()).page.held()
    assert LeasePageWriter().page.held()


SENDS_PAGE = """
import multiprocessing, pickle, time
from rlinf_actors.errors import UsageError
from rlinf_actors.worker.leasepage import LeasePageWriter

def tell(page, pipe):
    pipe.send((page.held(), page.deadline_ns))

if __name__ == "__main__":
    page = LeasePageWriter(time.monotonic_ns() + 60 * 10**9).page
    try:
        pickle.dumps(page)
    except UsageError as error:
        print(error)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(page, theirs))
    child.start()
    assert ours.recv() == (True, page.deadline_ns)
    child.join()
    assert child.exitcode == 0
"""


def test_a_lease_page_goes_to_a_spawned_process_and_nowhere_else(tmp_path):
    script = tmp_path / "sends_page.py"
    script.write_text(SENDS_PAGE)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    said = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "a lease page cannot be sent" in said.stdout


def test_only_its_writer_can_write_a_lease_page():
    fd = LeasePageWriter().page.fd
    with pytest.raises(PermissionError):
        mmap.mmap(fd, mmap.PAGESIZE)
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.write(other, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(other, mmap.PAGESIZE)
    finally:
        os.close(other)


HEADER = """
import os, sys, threading, time, traceback
from rlinf_actors.worker import standstill as module
from rlinf_actors.worker.standstill import ThreadStopper, Unwound, waits_for_lock

module.STOP_MAIN_S = 30.0  # on a busy machine the main thread may not get its turn for longer than a robot could wait
stopper = ThreadStopper()

def guard(act):
    def run():
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # else the main thread would stand still for good

    thread = threading.Thread(target=run, name="rlinf-actors-guard", daemon=True)
    thread.start()
    return thread
"""


def run(body: str) -> str:
    """In a process of its own: what stands still there does so for good."""
    done = subprocess.run(
        [sys.executable, "-c", HEADER + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        check=False,
        timeout=pace.PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_of_the_user_stop_and_threads_of_the_runtime_go_on():
    out = run("""
        counts = [0, 0]
        begun = threading.Barrier(3)

        def one():  # without any call, Python 3.10 would look at neither signals nor other threads in this loop
            return 1

        def count(n):
            begun.wait()
            while True:
                try:
                    counts[n] += one()
                except BaseException:
                    counts[n] += 1000000

        def act():
            begun.wait()
            assert stopper.stop_all()
            before = list(counts)
            threading.Event().wait(0.1)
            print(before == counts, max(counts) < 1000000 * 100, flush=True)
            os._exit(0)

        threading.Thread(target=count, args=(0,), daemon=True).start()
        guard(act)
        count(1)
    """)
    assert out == "True True\n"


def test_main_thread_that_masks_all_signals_stops():
    out = run("""
        import signal
        begun, count = threading.Event(), [0]

        def one():
            return 1

        def act():
            begun.wait()
            still, before = stopper.stop_all(), count[0]
            threading.Event().wait(0.1)
            print(still, before == count[0], flush=True)
            os._exit(0)

        guard(act)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        begun.set()
        while True:
            try:
                count[0] += one()
            except BaseException:
                continue
    """)
    assert out == "True True\n"


def test_main_thread_whose_handler_was_replaced_stops():
    out = run("""
        import signal
        begun, count = threading.Event(), [0]
        module.STOP_MAIN_S = 0.2

        def one():
            return 1

        def act():
            begun.wait()
            still = stopper.stop_all()
            threading.Event().wait(0.1)
            before = count[0]
            threading.Event().wait(0.1)
            print(still, before == count[0], flush=True)
            os._exit(0)

        guard(act)
        signal.signal(module.SIGNAL, lambda *_: None)
        begun.set()
        try:  # as in a worker, whose main function catches everything
            while True:
                count[0] += one()
        except Unwound:
            raise
    """)
    assert out == "False True\n"


def test_unwound_threads_release_their_locks():
    out = run("""
        lock, held = threading.Lock(), threading.Event()

        def act():
            held.wait()
            assert stopper.stop_all()
            waiting = guard(lock.acquire)
            while not waits_for_lock(waiting.native_id):  # nobody is told of that; it may be the interpreter's own yet
                os.sched_yield()
            print(waiting.is_alive(), flush=True)
            stopper.unwind()
            waiting.join()
            print("got it", flush=True)

        ending = guard(act)
        try:
            with lock:
                held.set()
                time.sleep(60)
        except Unwound:
            ending.join()
    """)
    assert out == "True\ngot it\n"


@pytest.mark.parametrize("times", [0, 2])
def test_signal_that_interrupts_nothing_is_sent_again_and_an_extra_one_is_harmless(times):
    out = run(f"""
        import signal
        kill, held, sent = signal.pthread_kill, threading.Event(), []

        def send(thread, number):
            sent.append(number)
            for _ in range({times} if len(sent) == 1 else 2):
                kill(thread, number)

        def act():
            held.wait()
            print(stopper.stop_all(), len(sent), flush=True)
            stopper.unwind()

        signal.pthread_kill = send
        ending = guard(act)
        try:
            held.set()
            time.sleep(60)
        except Unwound:
            ending.join()
            print("ended in order", flush=True)
    """)
    (first, ended) = out.splitlines()
    still, sent = first.split()
    assert (still, ended) == ("True", "ended in order")
    assert int(sent) >= (1 if times else 2)


def test_thread_that_waits_for_time_or_a_device_does_not_wait_for_a_lock():
    out = run("""
        import platform
        locks = ("running", module._FUTEX[platform.machine()])  # the interpreter's own lock is one too

        def entered(thread):
            while open(f"/proc/self/task/{thread.native_id}/syscall").read().split()[0] in locks:
                os.sched_yield()

        a, b = os.pipe()
        reading = guard(lambda: os.read(a, 1))
        sleeping = guard(lambda: time.sleep(60))
        entered(reading)
        entered(sleeping)
        print(waits_for_lock(reading.native_id), waits_for_lock(sleeping.native_id))
    """)
    assert out == "False False\n"
