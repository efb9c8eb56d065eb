"""Notifications to the service manager, over a real socket: times, order, and omissions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import time

import pytest

from rlinf_actors.systemd.service_manager import Manager


@contextlib.contextmanager
def listening(address: str):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if address.startswith("@") else address)
        manager.setblocking(False)
        yield manager


def received(manager: socket.socket) -> list[str]:
    """Receive all waiting notifications."""
    heard = []
    with contextlib.suppress(BlockingIOError):
        while True:
            heard.append(manager.recv(4096).decode())
    return heard


@pytest.fixture
def heard(tmp_path):
    with listening(str(tmp_path / "s")) as manager:
        yield manager, str(tmp_path / "s")


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_notifications_reach_both_kinds_of_address(tmp_path, kind):
    address = str(tmp_path / "notify") if kind == "path" else f"@rlinf-{os.getpid()}-{tmp_path.name}"
    with listening(address) as manager:
        Manager(address).ready("up")
        assert received(manager) == ["READY=1\nSTATUS=up"]


def test_notifications_of_one_life_arrive_in_order(heard):
    socket_, address = heard
    manager = Manager(address)
    before = time.monotonic_ns() // 1000
    manager.ready("up")
    manager.status("busy")
    manager.reloading("reading")
    manager.reloaded("up again")
    manager.stopping("SIGTERM")
    after = time.monotonic_ns() // 1000
    ready, busy, reloading, again, stopping = received(socket_)
    assert (ready, busy, again) == ("READY=1\nSTATUS=up", "STATUS=busy", "READY=1\nSTATUS=up again")
    assert stopping == "STOPPING=1\nSTATUS=SIGTERM"
    first, at, status = reloading.split("\n")
    assert (first, status) == ("RELOADING=1", "STATUS=reading")
    assert before <= int(at.removeprefix("MONOTONIC_USEC=")) <= after


def test_reload_before_ready_does_not_send_ready(heard):
    socket_, address = heard
    manager = Manager(address)
    manager.reloading("reading")
    manager.reloaded("read")
    assert received(socket_) == ["STATUS=reading", "STATUS=read"]


def test_no_ready_is_sent_after_stopping(heard):
    socket_, address = heard
    manager = Manager(address)
    manager.stopping("a")
    manager.ready("the head is there")
    manager.reloading("b")
    assert received(socket_) == ["STOPPING=1\nSTATUS=a", "STATUS=the head is there", "STATUS=b"]


def test_a_status_is_one_line(heard):
    socket_, address = heard
    Manager(address).status("one\nREADY=1\n two")
    assert received(socket_) == ["STATUS=one READY=1 two"]


def test_missing_manager_is_only_logged(tmp_path, caplog):
    Manager(str(tmp_path / "nobody")).ready("up")
    assert "cannot notify the service manager" in caplog.text


def test_full_queue_drops_a_status_without_waiting(heard, caplog):
    socket_, address = heard
    manager = Manager(address)
    while not caplog.records:  # the kernel queues a few hundred at most
        manager.status("x")
    assert "cannot notify the service manager" in caplog.text
    assert set(received(socket_)) == {"STATUS=x"}


def test_without_a_manager_there_are_no_notifications_and_no_watchdog():
    manager = Manager("", 10.0)
    manager.ready("up")
    loop = asyncio.new_event_loop()
    assert manager.watch(loop) is None
    assert Manager("/x", None).watch(loop) is None
    loop.close()


async def test_stalled_loop_does_not_notify_the_watchdog(heard):
    socket_, address = heard
    loop = asyncio.get_running_loop()
    interval_s = 0.02
    watchdog = Manager(address, 2 * interval_s).watch(loop)
    assert watchdog is not None
    assert received(socket_) == ["WATCHDOG=1"], "at once"
    readable = asyncio.Event()
    loop.add_reader(socket_.fileno(), readable.set)
    await readable.wait()
    loop.remove_reader(socket_.fileno())
    assert set(received(socket_)) == {"WATCHDOG=1"}  # more than one if this process stalled
    assert select.select([socket_], [], [], 10 * interval_s)[0] == [], "this call stalls the loop"
    watchdog.close()
    watchdog.close()
