"""A server on loopback whose end is the end of every connection that it has accepted.

asyncio's own, once closed, forgets those that it has accepted and not begun to serve: a test that ends at such a moment
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
    """Listen, and give the port. Each connection's task gets its socket (not blocking), which is closed when it ends.

    What a connection's task raised is raised at the end; those that are left are cancelled there.
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
    """Exactly *count* bytes, fewer where the connection ends before."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < count and (data := await loop.sock_recv(connection, count - len(received))):
        received += data
    return received
