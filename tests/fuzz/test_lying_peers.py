import sys, math
sys.path.insert(0, "tests/head")
import sqlite3
import pytest
from hypothesis import given, settings, strategies as st, HealthCheck
from head_kit import HeadKit
from structured import messages
from rlinf_actors.wire import codec
from rlinf_actors.wire.messages import Body, Request, Notice
from rlinf_actors.wire.session import AgentHello, ClientHello
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.head.commands import *
import typing, msgspec

PEERS = st.sampled_from(["a:n0", "d1", "x"])

@pytest.mark.parametrize("kind", typing.get_args(Body), ids=lambda k: k.__name__)
def test_head(kind):
    @given(st.data())
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def go(data):
        kit = HeadKit()
        kit.cluster(2)
        kit.launch("g", [0, 1])
        kit.ready("a:n0", "g-0")
        for n in range(2):
            body = data.draw(messages(kind))
            try:
                body = codec.decode(codec.encode(Notice(body))).body
            except (RemoteWireError, OverflowError):
                continue
            if isinstance(body, (AgentHello, ClientHello)) and data.draw(st.booleans()):
                body = msgspec.structs.replace(body, protocol=5, version="1.0")
            peer = data.draw(PEERS)
            if data.draw(st.booleans()): kit.ask(peer, body)
            else: kit.tell(peer, body)
            for c in kit.out:
                if isinstance(c, Notify): codec.encode(Notice(c.body))
                if isinstance(c, Answer): codec.encode(Notice(c.body))
            assert not math.isnan(kit.head.next_deadline())
            kit.wait(30)
            for c in kit.out:
                if isinstance(c, (Notify, Answer)): codec.decode(codec.encode(Notice(c.body)))
    go()
