"""What the driver of test_keyed_nodes launches."""

from __future__ import annotations

from rlinf_actors import Worker


class Carrier(Worker):
    def echo(self, text: str) -> str:
        self.log_info(f"log line: {text}")
        print(f"output: {text}", flush=True)
        return text

    def swap(self, text: str) -> str:
        """Send to the other rank and receive what that sends."""
        other = 1 - self._rank
        sent = self.send({"text": text}, self._group_name, other, async_op=True)
        got = self.recv(self._group_name, other)
        sent.wait()
        return got["text"]

    def through(self, channel, text: str) -> str:
        if self._rank == 0:
            channel.put({"text": text})
            return text
        return channel.get()["text"]
