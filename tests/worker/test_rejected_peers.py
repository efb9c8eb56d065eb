"""Peers that a worker's sockets reject: the worker counts each and logs the 1st, the 10th, the 100th, ..."""

from __future__ import annotations

import logging

from rlinf_actors.worker.joining import RejectedPeers


def test_first_tenth_and_hundredth_rejection_is_logged_with_peer_reason_and_count(caplog):
    rejected = RejectedPeers()
    for _ in range(9):
        rejected.add("a connection from 10.0.0.9: it came without a key")
    rejected.add("a connection from 10.0.0.8: it came without a key", 2)
    for _ in range(200):
        rejected.add("the link 'driver:x': it does not have its job's token")
    assert rejected.count == 211
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection from 10.0.0.9: it came without a key (1 so far)",
        "refused a connection from 10.0.0.8: it came without a key (11 so far)",
        "refused the link 'driver:x': it does not have its job's token (100 so far)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_many_rejections_at_once_are_one_line(caplog):
    rejected = RejectedPeers()
    rejected.add("a connection: it came without a key", 5000)
    rejected.add("a connection: it came without a key", 4000)
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection: it came without a key (5000 so far)"
    ]
