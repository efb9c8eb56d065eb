"""The listener of a worker: ZeroMQ's and the unix streams' as one."""

from __future__ import annotations

import types

from rlinf_actors.net.local_network import LocalListener


def test_the_ends_of_streams_are_noticed_and_those_of_zeromq_are_not():
    streams = types.SimpleNamespace(peers={b"near": None}, on_ended=None, _queue=None)
    listener = LocalListener(types.SimpleNamespace(), streams)
    listener.on_ended = print
    assert streams.on_ended is print
    assert b"near" in listener
    assert b"far" not in listener
