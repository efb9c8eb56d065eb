"""Where torch's sockets listen: the store of users' groups on MASTER_ADDR only; lanes over gloo have no store."""

from __future__ import annotations

import live_workers as lw
import pytest

pytest.importorskip("torch")

import torch_socket_workers as sockets

from rlinf_actors.settings import PATHS

pytestmark = [pytest.mark.live, pytest.mark.torch]


def test_nothing_of_torch_listens_on_every_interface(cluster):
    group = lw.many(cluster, sockets.Trainer, 2, name="trainers", env_vars={PATHS: "cpu=lane"})
    port = group.master_port().wait()[0]
    # Each begins when both ranks have ended the one before. With torch alone, too, a rank that makes the next group
    # at once may join the store of the last, which rank 0 has not closed yet; both then wait for their time-outs.
    lives = [group.train(1).wait() for _ in range(2)]
    first, second = ([life[rank][0] for life in lives] for rank in range(2))
    for time, (zero, one) in enumerate(zip(first, second, strict=True)):
        assert zero.keys() == {"127.0.0.1"}, "rank 0 serves the store, and gloo's data socket"
        assert zero["127.0.0.1"].count(port) == 1, f"the store of the group made as number {time}"
        assert one.keys() == {"127.0.0.1"}
        assert port not in one["127.0.0.1"]
    before = [len(ports.get("127.0.0.1", [])) for ports in (first[1], second[1])]
    lanes = group.exchange().wait()
    assert all(ports.keys() == {"127.0.0.1"} for ports in lanes)
    # two lanes in each process: a data socket for each, and no store, neither of lanes nor of the group that has ended
    assert [len(ports["127.0.0.1"]) for ports in lanes] == [2, 2], (before, lanes)
