"""The accelerators' locks through real templates: stand-in workers ask, die, and are stopped."""

import asyncio
import os
import signal

import pytest
from workers_kit import children, order, spec

from agentd.device_locks import DeviceLocks
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.values import HardwareReport, ResourceReport

pytestmark = pytest.mark.slow

GPUS = [ResourceReport("NV_GPU", [HardwareReport("NV_GPU", "A800", {"index": n, "uuid": f"u{n}"}) for n in range(2)])]

LOCK = (
    "sock.send(spawn.encode(spawn.LockDevices(spec.id, 1))); print('asked', spec.id, flush=True); "
    "print(spawn.decode_to_worker(sock.recv(999)), flush=True)"
)
FIRST = "from rlinf_actors.wire import template_protocol as spawn"


def on_gpu(ranks, do, group="g", **fields):
    env = {"ACCELERATOR_TYPE": "NV_GPU", "LOCAL_HARDWARE_RANKS": ranks}
    return spec(do=do, group=group, first=FIRST, env=env, **fields)


async def asked(reports, one):
    await reports.up(one)  # what a worker prints may come before
    await reports.line(f"asked {one.id}")


async def locked(reports, one):
    await reports.up(one)
    await reports.line(f"DevicesLocked(id='{one.id}', request=1)")


async def test_lock_of_a_killed_worker_goes_to_the_next(tmp_path):
    async with children(tmp_path, resources=GPUS) as (kids, reports):
        first, second = on_gpu("0", LOCK, "a"), on_gpu("0,1", LOCK, "b", namespace="other")
        kids.start(order([first]))
        await locked(reports, first)
        kids.start(order([second]))
        await asked(reports, second)
        other = on_gpu("1", LOCK, "c")
        kids.start(order([other]))
        await asked(reports, other)
        assert len([line for line in reports.lines if "DevicesLocked" in line[2]]) == 1
        os.kill(reports.ready[first.id].pid, signal.SIGKILL)
        await locked(reports, second)
        kids.stop([second.id], 1.0)
        await locked(reports, other)


async def test_dead_waiter_leaves_the_queue_and_unlock_frees_the_lock(tmp_path):
    unlock = (
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); {LOCK}; signal.sigwait([signal.SIGUSR1]); "
        "sock.send(spawn.encode(spawn.UnlockDevices(spec.id, 1)))"
    )
    async with children(tmp_path, resources=GPUS) as (kids, reports):
        first, second, third = on_gpu("0", unlock, "a"), on_gpu("0", LOCK, "b"), on_gpu("0", LOCK, "c")
        kids.start(order([first]))
        await locked(reports, first)
        for one in (second, third):
            kids.start(order([one]))
            await asked(reports, one)
        os.kill(reports.ready[second.id].pid, signal.SIGKILL)
        await reports.gone(second)
        os.kill(reports.ready[first.id].pid, signal.SIGUSR1)
        await locked(reports, third)
        assert first.id not in reports.exits


async def test_dead_template_frees_its_workers_locks(tmp_path):
    async with children(tmp_path, resources=GPUS) as (kids, reports):
        first, second = on_gpu("0", LOCK, "a"), on_gpu("0", LOCK, "b", preload=("json",))
        kids.start(order([first]))
        await locked(reports, first)
        kids.start(order([second]))
        await asked(reports, second)
        os.kill(kids._workers[first.id].template.pid, signal.SIGKILL)
        await locked(reports, second)


async def test_stopped_worker_gets_its_lock_when_it_continues(tmp_path):
    async with children(tmp_path, resources=GPUS) as (kids, reports):
        first, second = on_gpu("0", LOCK, "a"), on_gpu("0", LOCK, "b")
        kids.start(order([first]))
        await locked(reports, first)
        kids.start(order([second]))
        await asked(reports, second)
        os.kill(reports.ready[second.id].pid, signal.SIGSTOP)
        kids.stop([first.id], 0.0)
        await reports.gone(first)
        os.kill(reports.ready[second.id].pid, signal.SIGCONT)
        await locked(reports, second)


@pytest.mark.virtual_time
async def test_long_waiting_worker_is_told_once_which_worker_has_the_lock():
    sent = []
    told = asyncio.Event()

    def send(packet):
        sent.append(packet)
        if sum(isinstance(one, template_protocol.DevicesBusy) for one in sent) == 2:
            told.set()

    a, b, c = (on_gpu("0", "", name) for name in "abc")
    owners = {a.id: "ann's train.py (pid 7 on gpu-1, started 3 h ago)"}
    locks = DeviceLocks(asyncio.get_running_loop(), GPUS, owners, patience_s=0.01)
    for one in (a, b, c):
        locks.handle(one, template_protocol.LockDevices(one.id, 7), send)
    await told.wait()
    held = "held by a:0 (job 'ns'), owned by ann's train.py (pid 7 on gpu-1, started 3 h ago), for 0 s"
    assert sent == [
        template_protocol.DevicesLocked(a.id, 7),
        template_protocol.DevicesBusy(b.id, 7, 0.01, held, ["a:0"]),
        template_protocol.DevicesBusy(c.id, 7, 0.01, f"{held}; b:0 (job 'ns') came before", ["a:0"]),
    ]
    locks.say_holders(b.id)
    quiet = sent.pop()
    assert (quiet.id, quiet.request, quiet.text, quiet.holders, quiet.quiet) == (b.id, 7, held, ["a:0"], True)
    locks.say_holders(a.id)
    locks.say_holders("unknown")
    locks.worker_ended(a.id)
    locks.handle(b, template_protocol.UnlockDevices(b.id, 7), send)
    assert sent[3:] == [template_protocol.DevicesLocked(b.id, 7), template_protocol.DevicesLocked(c.id, 7)]
    for one in (b, c):
        locks.worker_ended(one.id)


async def test_message_to_a_waiter_fits_into_a_packet():
    """Names may have any length; a packet that is too long would be an error in agentd."""
    told = asyncio.get_running_loop().create_future()

    def send(packet):
        if isinstance(packet, template_protocol.DevicesBusy):
            told.set_result(packet)

    locks = DeviceLocks(asyncio.get_running_loop(), GPUS, {}, patience_s=0.01)
    a, b = (on_gpu("0", "", name * template_protocol.MAX_PACKET) for name in "ab")
    for one in (a, b):
        locks.handle(one, template_protocol.LockDevices(one.id, 7), send)
    assert len(template_protocol.encode(await told)) < 2 * template_protocol.TEXT_CHARS
    for one in (a, b):
        locks.worker_ended(one.id)
