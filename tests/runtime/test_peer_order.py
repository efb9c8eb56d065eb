"""What waited for a link goes out before anything else can."""

from __future__ import annotations

from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.messages import Endpoint


def test_nobody_sees_the_link_before_what_waited_was_sent():
    sent = []

    class Link:
        def send(self, header, parts=(), *, now=False):
            sent.append((type(frames.decode(header)), peer.connected))

        def close(self, linger_ms=0):
            pass

    class Network:
        def link(self, *_arguments):
            return Link()

    peer = Peer(Network(), "driver:x", "g:0", 0, "node")
    peer.send(frames.ChannelGet(1, b"", False))
    peer.connect(Endpoint("h", "ipc://x"), "h", "token", lambda: None)
    peer.send(frames.ChannelCancel(1, True))
    kinds = [frames.Join, frames.ChannelGet, frames.ChannelCancel]
    assert sent == list(zip(kinds, (False, False, True), strict=True))
