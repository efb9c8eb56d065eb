"""Output beyond its limits: a worker that fills its log, and a disk without room."""

import ctypes
import os
import re

import pytest
from workers_kit import children, order, spec

from rlinf_actors.wire.log_values import MARKS

pytestmark = pytest.mark.live

MIB = 1 << 20
_MNT_DETACH = 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    directory = tmp_path / "log"
    directory.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield directory
    libc.umount2(os.fsencode(directory), _MNT_DETACH)


async def test_full_log_keeps_the_newest_output(tmp_path):
    do = f"""
for n in range(100): print(("%03d " % n) * {MIB // 4 // 5})
print("done", flush=True)
"""
    async with children(tmp_path, rules={"log_bytes": 2 * MIB}) as (kids, reports):
        reports.credit = False
        one = spec(do=do)
        kids.start(order([one]))
        await reports.up(one)
        reports.credit = True
        kids.credit_logs(MIB, "ns")
        await reports.line("done")
        files = {path.name: path.stat().st_size for path in (tmp_path / "log/ns").iterdir()}
        assert MIB < sum(files.values()) < 5 * MIB
        logs = {name for name in files if not name.endswith(MARKS)}
        assert logs == {"g-0.out", "g-0.out.1", "g-0.err"}
        assert {name.removesuffix(MARKS) for name in files} == logs  # an older part's times went with it
        assert (tmp_path / "log/ns/g-0.out").read_text().endswith("done\n")
        assert one.id not in reports.exits


def fill(path):
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def test_full_disk_loses_output_only_until_there_is_room(tmp_path, small_disk):
    ballast = small_disk / "ballast"
    do = """
while True:
    word = sock.recv(1024)
    if not word: break
"""
    first = """
import threading
def speak():
    # a line for each that the test writes into the fifo
    for line in open(os.environ["FIFO"]):
        print("said", line.strip(), "." * 100000, flush=True)
threading.Thread(target=speak, daemon=True).start()
"""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with children(tmp_path, env={"FIFO": str(fifo)}) as (kids, reports):
        one = spec(do=do, first=first)
        kids.start(order([one]))
        await reports.up(one)
        with fifo.open("w", buffering=1) as say:
            say.write("before\n")
            await reports.line("said before")
            with pytest.raises(OSError, match="No space left"):
                fill(ballast)
            say.write("lost\n")
            lost = await reports.line("output is lost")
            assert "No space left on device" in lost[2]
            ballast.unlink()
            say.write("after\n")
            await reports.line("output is written again")
            await reports.line("said after")
            assert any("bytes of output are missing here" in text for _, _, text in reports.lines)
            assert one.id not in reports.exits, "the worker goes on"
            with pytest.raises(OSError, match="No space left"):
                fill(ballast)
            say.write("lost until the end\n")
            await reports.until(lambda: sum("output is lost" in text for _, _, text in reports.lines) == 2)
            kids.stop([one.id], 0.0)
            lost = await reports.line("bytes until the worker ended")
            count = int(re.findall(r"No space left on device; ([\d,]+) bytes", lost[2])[0].replace(",", ""))
            assert 60_000 < count < 100_100
