"""Event loops: uvloop where there is one, and a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlinf_actors.errors import UsageError

T = TypeVar("T")

log = logging.getLogger(__name__)

INTERNAL_ERROR = 70
"""EX_SOFTWARE of sysexits.h."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new loop; uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def end_on_internal_error(loop: asyncio.AbstractEventLoop) -> None:
    """End this process, a daemon, when an exception escapes a callback of *loop*: a bug of ours.

    Its state is half changed by then: it would look alive, and answer nobody. The end is like that of kill -9, with
    exit code `INTERNAL_ERROR`: whoever starts it anew gets one that takes over what the first one had.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if "handle" in context and isinstance(context.get("exception"), Exception):
            log.critical("internal error (above): this process ends, since it cannot know its state any more")
            logging.shutdown()
            os._exit(INTERNAL_ERROR)

    loop.set_exception_handler(handle)


class IoThread:
    """A thread that runs one event loop: the runtime's own I/O, away from the user's code.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._asking = threading.RLock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop. Any thread.

        Raises:
            UsageError: the thread was stopped: the Cluster was shut down.
        """
        with self._asking:  # what is asked before `stop` is begun before the loop's end, and ends with it at the latest
            if not self._stopped:
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        raise UsageError("the Cluster of this process was shut down: make a new one by Cluster(...)")

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function on the loop soon. Any thread; after `stop` it does nothing."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Run a function on the loop after *seconds*. Any thread; after `stop` it does nothing."""
        self.call(self.loop.call_later, seconds, function)

    def inside(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the loop and the thread. Not from the thread itself; twice is fine."""
        if self.loop.is_closed():
            return
        with self._asking:
            first, self._stopped = not self._stopped, True
            if first:
                self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
