"""A robot worker's lease, with a clock in hand; and how its threads are brought to a standstill, in real ones."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from rlinf_actors.worker.lease import Lease


def test_there_is_time_left_to_stop():
    lease = Lease(until=102.0, lease_s=2.0)
    assert lease.left(100.0) == pytest.approx(1.7)
    assert lease.left(101.7) == pytest.approx(0.0)
    assert lease.left(105.0) == 0.0
    assert lease.silence(101.7) == pytest.approx(1.7)


def test_an_older_renewal_changes_nothing():
    lease = Lease(until=102.0, lease_s=2.0)
    lease.renew(103.0)
    lease.renew(102.5)
    assert lease.until == 103.0


HEADER = """
import os, sys, threading, time
from rlinf_actors.worker.parking import Parking, Unwound, waits_for_lock

parking = Parking()

def guard(act):
    thread = threading.Thread(target=act, name="rlinf-actors-guard", daemon=True)
    thread.start()
    return thread
"""


def run(body: str) -> str:
    """In a process of its own: what stands still there does so for good."""
    done = subprocess.run(
        [sys.executable, "-c", HEADER + textwrap.dedent(body)], capture_output=True, text=True, check=False, timeout=15
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_thread_of_the_users_stands_still_and_ours_go_on():
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
            assert parking.park()
            before = list(counts)
            threading.Event().wait(0.1)
            print(before == counts, max(counts) < 1000000 * 100, flush=True)
            os._exit(0)

        threading.Thread(target=count, args=(0,), daemon=True).start()
        guard(act)
        count(1)
    """)
    assert out == "True True\n"


def test_a_lock_comes_back_when_they_are_let_go():
    out = run("""
        lock, held = threading.Lock(), threading.Event()

        def act():
            held.wait()
            assert parking.park()
            waiting = guard(lock.acquire)
            waiting.join(0.1)
            print(waiting.is_alive(), waits_for_lock(waiting.native_id), flush=True)
            parking.let_go()
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
    assert out == "True True\ngot it\n"


def test_one_that_waits_for_time_or_a_device_does_not_wait_for_a_lock():
    out = run("""
        a, b = os.pipe()
        reading = guard(lambda: os.read(a, 1))
        sleeping = guard(lambda: time.sleep(60))
        threading.Event().wait(0.1)
        print(waits_for_lock(reading.native_id), waits_for_lock(sleeping.native_id))
    """)
    assert out == "False False\n"
