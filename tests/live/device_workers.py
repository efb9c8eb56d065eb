"""Workers that lock their accelerators."""

from __future__ import annotations

import asyncio
import os

from rlinf_actors import Worker


class Locker(Worker):
    def take(self, timeout=None):
        return self.device_lock.acquire(timeout)

    def give(self):
        self.device_lock.release()

    def nested(self):
        with self.device_lock, self.device_lock:
            return self.device_lock.locked()

    def dies_with_it(self):
        self.device_lock.acquire()
        os._exit(3)

    def in_a_fork(self):
        """What a child process that this worker forked, and one that is a member, are told."""
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                told = []
                for worker in (self, Worker(parent_address=self.worker_address, world_size=1, rank=0)):
                    try:
                        worker.device_lock.acquire()
                    except RuntimeError as error:
                        told.append(str(error))
                os.write(writer, "\n".join(told).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader) as said:
            lines = said.read().splitlines()
        os.wait()
        return lines


class AsyncLocker(Worker):
    async def take(self, timeout=None):
        return await self.device_lock.acquire_async(timeout)

    async def give(self):
        self.device_lock.release()

    async def use(self):
        async with self.device_lock:
            return self.device_lock.locked()

    async def cancelled(self):
        """A wait that is cancelled, and whether the loop went on meanwhile."""
        waiting = asyncio.ensure_future(self.device_lock.acquire_async())
        await asyncio.sleep(0)
        waiting.cancel()
        done, _ = await asyncio.wait([waiting])
        return [one.cancelled() for one in done]
