"""Connections of nobody: bytes that are no ZMTP, or begin like it, to every socket that listens.

``python strangers.py knock|stream|"8 streams"|idle COUNT < addresses`` makes them from where it runs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
import os
import random
import resource
import selectors
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from listening import SIGNATURE, Listening, greeting

AT_A_TIME = 64
"""Connections that are open at once."""
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(190))
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
LENGTH_2_62 = (2**62).to_bytes(8, "big")


def raw(choose: random.Random) -> bytes:
    return choose.randbytes(choose.randrange(1, 2000))


def mutated_greeting(choose: random.Random) -> bytes:
    data = bytearray(greeting(choose.choice(("CURVE", "NULL", "PLAIN", "GSSAPI"))) + READY)
    for _ in range(choose.randrange(1, 6)):
        data[choose.randrange(len(data))] = choose.randrange(256)
    return bytes(data[: choose.randrange(1, len(data) + 1)]) + choose.randbytes(choose.randrange(100))


def endless_frame(choose: random.Random) -> bytes:
    """A frame, a command, or a part of a message that claims 2^62 bytes, after a handshake where there is none."""
    flags = bytes([choose.choice((2, 3, 6))])
    return greeting(choose.choice(("CURVE", "NULL"))) + READY + flags + LENGTH_2_62 + bytes(100)


def endless_old_frame(choose: random.Random) -> bytes:
    """The same in ZMTP 1 and 2."""
    return choose.choice((b"\xff" + LENGTH_2_62 + b"\0", SIGNATURE + b"\x01\x05\x02")) + LENGTH_2_62 + bytes(100)


def strange_messages(choose: random.Random) -> bytes:
    """Messages after a handshake: a ROUTER without keys hands them on."""
    frames = [choose.randbytes(choose.randrange(1, 200)) for _ in range(choose.randrange(1, 5))]
    flags = [1] * (len(frames) - 1) + [0]
    packed = (bytes([flag, len(frame)]) + frame for flag, frame in zip(flags, frames, strict=True))
    return greeting("NULL") + READY + b"".join(packed)


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "raw bytes": raw,
    "mutated greeting": mutated_greeting,
    "2^62 bytes": endless_frame,
    "2^62 bytes, old": endless_old_frame,
    "strange messages": strange_messages,
    "HTTP": lambda choose: b"GET / HTTP/1.1\r\nHost: head\r\n\r\n",
    "TLS": lambda choose: TLS_HELLO,
    "half a greeting": lambda choose: SIGNATURE[: choose.randrange(1, 10)],
    "nothing": lambda choose: b"",
}


def knock(addresses: Sequence[Listening], count: int, seed: int) -> Counter[str]:
    """*count* connections to each address, of all kinds. Returns when the other ends have closed theirs.

    One in ten is cut off by a reset at once, and one in ten stays open and says nothing more, AT_A_TIME of them. How
    each ended is counted: a server that does not close is a TimeoutError.
    """
    choose, ends = random.Random(seed), Counter[str]()
    half_open: deque[socket.socket] = deque()
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        stack.callback(lambda: [key.fileobj.close() for key in list(waiting.get_map().values())])

        def hear(wanted: int) -> None:
            while len(waiting.get_map()) > wanted:
                ready = waiting.select(20)
                if not ready:
                    raise TimeoutError(f"{len(waiting.get_map())} connections that we have ended are still open there")
                for key, _ in ready:
                    if _closed(key.fileobj):
                        waiting.unregister(key.fileobj)
                        key.fileobj.close()
                        ends[key.data] += 1

        for number in range(count * len(addresses)):
            kind = choose.choice(list(KINDS))
            link = addresses[number % len(addresses)].connect()
            try:
                link.sendall(KINDS[kind](choose))
                luck = choose.random()
                if luck < 0.1:
                    half_open.append(link)
                    if len(half_open) > AT_A_TIME:
                        half_open.popleft().close()
                    ends["half open"] += 1
                    continue
                if luck < 0.2:
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    link.close()
                    ends["reset by us"] += 1
                    continue
                link.shutdown(socket.SHUT_WR)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                    raise
            link.setblocking(False)
            waiting.register(link, selectors.EVENT_READ, kind)
            hear(AT_A_TIME)
        hear(0)
        for link in half_open:
            link.close()
        for address in addresses:  # those that we have closed came before, and are gone when this one is
            last = address.connect()
            last.shutdown(socket.SHUT_WR)
            waiting.register(last, selectors.EVENT_READ, "last")
        hear(0)
    return ends


def _closed(link: socket.socket) -> bool:
    try:
        return not link.recv(65536)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def idle(addresses: Sequence[Listening], count: int) -> list[socket.socket]:
    """So many connections to each that say nothing; who gets them closes them."""
    return [address.connect() for _ in range(count) for address in addresses]


def stream(address: Listening, choose: random.Random) -> str:
    """Send the first message of a handshake, which claims 1 GiB, until the other end closes; returns how that went."""
    flags = bytes([choose.choice((2, 6))])
    with address.connect() as link:
        try:
            link.sendall(greeting("CURVE") + flags + (1 << 30).to_bytes(8, "big"))
            for _ in range(1 << 14):
                link.sendall(bytes(1 << 16))
        except ConnectionError as error:
            return type(error).__name__
    return "all was taken"


def streams(addresses: Sequence[Listening], count: int, seed: int, at_a_time: int) -> Counter[str]:
    """*count* streams to each address."""
    choose = random.Random(seed)
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as threads:
        return Counter(threads.map(lambda address: stream(address, choose), [*addresses] * count))


def resident(pid: int, kind: str = "VmRSS") -> int:
    """Bytes of memory of a process, now or (VmHWM) at most since `begin_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def begin_peak(pid: int) -> None:
    """The most memory that a process has had begins anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def descriptors(pid: int) -> list[str]:
    """What the open descriptors of a process are, without numbers."""
    names = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(str(fd.readlink()).split(":")[0])
        except FileNotFoundError:
            continue
    return sorted(names)


class Latencies:
    """Of calls, in seconds."""

    def __init__(self) -> None:
        self._taken: list[float] = []

    def of(self, call: Callable[[], object]) -> None:
        begin = time.perf_counter()
        call()
        self._taken.append(time.perf_counter() - begin)

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def p99(self) -> float:
        """Milliseconds."""
        ordered = sorted(self._taken)
        return 1e3 * ordered[int(0.99 * (len(ordered) - 1))]


def main(what: str, count: int) -> None:
    """As strangers on another machine: what is said on stdin, then what came of it on stdout."""
    os.nice(19)  # they have processors of their own: what they make others do is what counts
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    addresses = [Listening(**one) for one in json.loads(sys.stdin.readline())]
    if what == "knock":
        print(json.dumps(knock(addresses, count, 1)), flush=True)
    elif what == "stream":
        print(json.dumps(streams(addresses, count, 1, 1)), flush=True)
    elif what == "8 streams":
        print(json.dumps(streams(addresses, count, 1, 8)), flush=True)
    else:
        links = idle(addresses, count)
        print(json.dumps({"idle": len(links)}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
