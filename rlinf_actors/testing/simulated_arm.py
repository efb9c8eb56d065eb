"""A simulated robot arm: a process that records every command, and a client for workers.

The protocol is lines of text over TCP. A client sends ``move X``, ``stop`` or ``hello NAME``; the arm sends ``state
POSITION MOVING`` to every client, 20 times a second by default. The record is a file with one JSON object per line:
time (CLOCK_MONOTONIC, which all processes of a machine share), connection, command.

``python -m rlinf_actors.testing.simulated_arm --port 0 --record FILE`` runs one arm and prints a line that ends with
the arm's address and port. Each further --record makes another arm, with a line of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_actors.net.loop import Tasks

RATE_HZ = 20.0
_MAX_LINE = 256


@dataclass(frozen=True)
class Command:
    """One line of a simulated arm's record: a command that the arm took, or the end of a connection.

    Attributes:
        at: time at which the arm took the command, in seconds of CLOCK_MONOTONIC.
        connection: number of the connection, from 1 on; 0 for the arm's own watchdog.
        text: the command, such as ``move 0.25``, ``stop`` or ``hello env:0``; or ``closed`` at the end of a connection.
    """

    at: float
    connection: int
    text: str


class SimulatedArm:
    """One simulated arm: a TCP server that takes commands, records them, and sends its state to its clients. Use it on
    the loop thread only.

    Args:
        record: path of the file to which the arm appends every command.
        rate_hz: states to send per second.
        watchdog_s: seconds without a command after which a moving arm stops; 0 for never.
    """

    def __init__(self, record: str, *, rate_hz: float = RATE_HZ, watchdog_s: float = 0.0) -> None:
        self.name = f"the simulated arm with the record {record}"
        self._record = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rate_hz = rate_hz
        self._watchdog_s = watchdog_s
        self._position = 0.0
        self._moving = False
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Server
        self._tasks = Tasks()

    async def listen(self, host: str, port: int) -> int:
        """Listen for clients of the arm at *host* and *port* (0 for a free port). Return the TCP port. The arm accepts
        clients until `close`.
        """
        self._server = await asyncio.start_server(self._client, host, port, limit=_MAX_LINE)
        self._tasks.start(self._send_states(), "sending states")
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close all connections of the arm and its record."""
        await self._tasks.close()
        self._server.close()
        for writer in self._clients.values():
            writer.transport.abort()
        if self._clients:
            await asyncio.wait(self._clients)
        os.close(self._record)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count += 1
        connection = self._count
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        try:
            while line := await reader.readline():
                self._obey(connection, line.decode(errors="replace").strip())
        except ConnectionError:
            pass  # a client that ended with states unread
        except ValueError as error:
            self._note(connection, f"dropped: {error}")  # a line that is too long
        finally:
            del self._clients[task]
            writer.close()
            self._note(connection, "closed")

    def _obey(self, connection: int, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word == "move":
            try:
                self._position = float(rest)
            except ValueError:
                self._note(connection, f"refused: {text}")
                return
            self._moving = True
        elif word == "stop":
            self._moving = False
        elif word != "hello":
            text = f"refused: {text}"
        self._note(connection, text)
        if self._timer is not None:
            self._timer.cancel()
        if self._watchdog_s and self._moving:
            self._timer = asyncio.get_running_loop().call_later(self._watchdog_s, self._obey, 0, "stop")

    def _note(self, connection: int, text: str) -> None:
        line = json.dumps({"at": time.monotonic(), "connection": connection, "command": text})
        os.write(self._record, line.encode() + b"\n")

    async def _send_states(self) -> None:
        while True:
            line = f"state {self._position:.6f} {int(self._moving)}\n".encode()
            for writer in self._clients.values():
                writer.write(line)
            await asyncio.sleep(1 / self._rate_hz)


class SimulatedArmClient:
    """A worker's connection to a simulated arm. Any thread. Sending a command is one system call and takes no lock.

    Args:
        address: ``HOST:PORT`` of the arm.
        name: name of this connection in the arm's record.

    Raises:
        OSError: no arm listens at *address*.
    """

    def __init__(self, address: str, name: str = "") -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=5.0)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        if name:
            self._send(f"hello {name}")

    def move(self, position: float) -> None:
        """Command the arm to move to *position*. Raise OSError if the connection is broken."""
        self._send(f"move {position:.6f}")

    def stop(self) -> None:
        """Command the arm to stop, and wait for the state that confirms the stop. Raise OSError if the connection is
        broken.

        Without the wait, the command could be lost if this process ends right after it: when a process ends without
        reading all data of a connection, the kernel drops what the process wrote and the kernel has not sent yet.
        """
        with contextlib.suppress(BlockingIOError):  # what it has said until now confirms nothing
            while data := self._socket.recv(1 << 16, socket.MSG_DONTWAIT):
                self._received += data
        self._received = self._received[self._received.rfind(b"\n") + 1 :]
        self._send("stop")
        while self.state()[1]:
            pass

    def state(self) -> tuple[float, bool]:
        """Wait until the arm sends its state. Return its position, and True if the arm is moving.

        Raises:
            OSError: the arm has closed the connection.
        """
        while b"\n" not in self._received:
            data = self._socket.recv(4096)
            if not data:
                raise ConnectionError("the arm closed the connection")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        _, position, moving = line.decode().split()
        return float(position), moving == "1"

    def fileno(self) -> int:
        """Return the file descriptor of the connection to the arm, for code that writes commands (lines of text)
        itself.
        """
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection to the arm. The arm continues with its last command."""
        self._socket.close()

    def _send(self, text: str) -> None:
        self._socket.sendall(text.encode() + b"\n")


def read_record(path: str | Path) -> list[Command]:
    """Return the commands in a simulated arm's record, the file *path*, in the order in which the arm took them. An
    incomplete last line is ignored.
    """
    lines = Path(path).read_text().split("\n")[:-1]
    return [Command(one["at"], one["connection"], one["command"]) for one in map(json.loads, lines)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run simulated arms as the command line *arguments* say, until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="simulated_arm", description="A robot arm that only records its commands.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 for a free one, which is printed")
    parser.add_argument(
        "--record", required=True, action="append", metavar="FILE", help="file that every command is appended to"
    )
    parser.add_argument("--rate", type=float, default=RATE_HZ, metavar="HZ", help="states a second (%(default)g)")
    parser.add_argument("--watchdog", type=float, default=0.0, metavar="S", help="stop after S seconds without command")
    given = parser.parse_args(arguments)
    arms = [SimulatedArm(record, rate_hz=given.rate, watchdog_s=given.watchdog) for record in given.record]
    asyncio.run(serve(arms, given.host, given.port))


async def serve(arms: Sequence[SimulatedArm], host: str, port: int) -> None:
    """Let each simulated arm listen at *host* and *port*, print where, and run until SIGTERM or SIGINT. With port 0,
    each arm listens at a free port of its own.
    """
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    ports = [await arm.listen(host, port) for arm in arms]
    sys.stdout.write("".join(f"{arm.name} listens at {host}:{port}\n" for arm, port in zip(arms, ports, strict=True)))
    sys.stdout.flush()
    await over.wait()
    for arm in arms:
        await arm.close()


if __name__ == "__main__":
    main()
