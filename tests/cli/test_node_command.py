"""`rlinf-actors node`: finding a node, showing it, and draining a real one."""

from __future__ import annotations

import json
import threading

import pace
import pytest
from cli_kit import example_status, node

from rlinf_actors import Worker
from rlinf_actors.cli import app
from rlinf_actors.cli.node_command import find_node
from rlinf_actors.errors import PlacementError, UsageError


@pytest.mark.parametrize("name", ["1", "n1", "id-n1"])
def test_find_node_accepts_rank_name_and_id(name):
    assert find_node([node(0), node(1)], name).rank == 1


@pytest.mark.parametrize(("name", "said"), [("n7", "there are: n0 (id id-n0), nx"), ("nx", "2 nodes are called 'nx'")])
def test_an_unknown_or_ambiguous_node_is_an_error(name, said):
    with pytest.raises(UsageError) as raised:
        find_node([node(0), node(-1), node(-1)], name)
    assert said in str(raised.value)


def test_a_node_is_shown_with_its_groups(shown):
    code, out, _ = shown("node", "show", "n0", "--json")
    data = json.loads(out)
    assert (code, data["rank"], data["draining"]) == (0, 0, "")
    assert data["groups"] == [{"group": "greeters", "namespace": "job-1", "ranks": [0], "owner": "has ended"}]
    code, out, err = shown("node", "show", "2")
    assert (code, "state     lost" in out, "nothing runs there" in err) == (0, True, True)


def test_an_unknown_node_is_a_usage_error(shown):
    assert shown("node", "show", "n7", status=example_status())[0] == 64


class Idle(Worker):
    def here(self) -> bool:
        return True


@pytest.mark.live
def test_drain_command_waits_until_the_node_is_drained(local_cluster, monkeypatch, capsys, caplog):
    local = local_cluster(num_nodes=2)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    cluster = local.cluster()
    group = cluster.allocate(Idle, "idle", node_rank=1)
    group.here().wait()

    assert app.run(["node", "drain", "node1", "--reason", "new disk", "--wait", "0.3"]) == 69
    out, err = capsys.readouterr()
    assert "idle" in out
    assert "node node1 is not empty after 0.3 s; still running there: idle of job" in err
    with pytest.raises(PlacementError, match=r"node1 .*draining: new disk \(by "):
        cluster.allocate(Idle, "more", node_rank=1)
    assert group.here().wait() == [True]
    assert [r.getMessage() for r in caplog.records if "is being drained: new disk" in r.getMessage()]

    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(app.run(["node", "drain", "1", "--wait", "30"])))
    waiting.start()
    group.shutdown()
    waiting.join(pace.PATIENCE_S)
    assert codes == [0]
    assert "node node1 is drained: ready for maintenance" in capsys.readouterr().err

    assert app.run(["node", "undrain", "node-1"]) == 0
    assert cluster.allocate(Idle, "again", node_rank=1).here().wait() == [True]
