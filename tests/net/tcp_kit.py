"""A server on loopback that closes every accepted connection at its end.

A closed asyncio server forgets connections that it has accepted and does not serve yet: a test that ends at that moment
leaves a socket behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def tcp_server(serve: Callable[[socket.socket], Awaitable[None]]) -> AsyncIterator[int]:
    """Listen, and yield the port. The task of each connection gets its nonblocking socket, closed at the task's end.

    At the end, an exception of a connection's task is raised, and unfinished tasks are cancelled.
    """
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def served(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            await serve(connection)

    def accept() -> None:
        connection, _ = listening.accept()
        connection.setblocking(False)
        task = loop.create_task(served(connection))
        task.add_done_callback(lambda _: connection.close())  # also where it was cancelled before it began
        tasks.append(task)

    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        loop.add_reader(listening, accept)
        try:
            yield listening.getsockname()[1]
        finally:
            loop.remove_reader(listening)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()


async def receive(connection: socket.socket, count: int) -> bytes:
    """Return *count* bytes, or fewer if the connection ends before."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < count and (data := await loop.sock_recv(connection, count - len(received))):
        received += data
    return received
