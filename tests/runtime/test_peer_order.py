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
        memory = None
        soon = staticmethod(lambda function: None)

        def link(self, *_arguments):
            return Link()

    peer = Peer(Network(), "driver:x", "g:0", 0, "node")
    peer.send(frames.Call(1, "step"))
    peer.connect(Endpoint("h", "ipc://x"), "h", "token", lambda: None)
    peer.send(frames.Cancel(1))
    kinds = [frames.Join, frames.Call, frames.Cancel]
    assert sent == list(zip(kinds, (False, False, True), strict=True))
