"""What `rlinf-actors top` shows: rows, order, filter and keys."""

from __future__ import annotations

import pytest
from board_kit import board, figures, status
from msgspec.structs import replace

from rlinf_actors.cli.top.view import Choice, headline, keys, pressed, report, table
from rlinf_actors.sampling.sample import Board, Sample
from rlinf_actors.serve.pages import summary
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.figure_values import ChannelFigures, DeviceFigures, NodeFigures, ProcessFigures, WorkerFigures
from rlinf_actors.wire.values import GroupState, NodeReport, NodeState, WorkerState


def cluster() -> Board:
    """Three workers whose orders by name, CPU, memory and GPU all differ, on two nodes, with two channels."""
    nodes = [
        NodeState(NodeReport(f"id-{n}", f"n{n}", f"10.0.0.{n}", "", 8, 1 << 34, "3.11", "/p"), "i", n, "ready", 0.0)
        for n in (0, 1)
    ]

    def group(name: str, *places: int) -> GroupState:
        workers = [WorkerState(f"{name}-{rank}", rank, node, "ip", "running", 9) for rank, node in enumerate(places)]
        return GroupState("job", name, "m:C", "d", "running", workers)

    groups = [group("actor", 0, 1), group("env", 1), group("channel@a", 0), group("channel@b", 0)]
    status = Status("e", "1", 1.0, nodes, groups, [], at=5.0)

    def worker(id: str, cpu_s: float, rss: int, gpu: int, method: str = "") -> WorkerFigures:
        return WorkerFigures(id, ProcessFigures(cpu_s, rss), method, 90.0, accelerator_bytes=gpu)

    found = Board()
    for at in (0.0, 10.0):
        first = [
            worker("actor-0", at * 0.1, 3 << 20, -1),
            WorkerFigures("channel@a-0", channel=ChannelFigures(items=1, size=10)),
            WorkerFigures("channel@b-0", channel=ChannelFigures(items=7, size=5)),
        ]
        second = [worker("actor-1", at * 0.9, 1 << 20, 1 << 30, "step"), worker("env-0", at * 0.5, 2 << 20, 2 << 30)]
        gpus = [DeviceFigures("NV_GPU", 90, 50, 80 << 30, 20 << 30), DeviceFigures("NV_GPU", 30)]
        figures = {
            "id-0": NodeFigures(first, cpu_s=at, cpus=8, memory_bytes=1 << 34, memory_free_bytes=1 << 33),
            "id-1": NodeFigures(second, cpu_s=4 * at, cpus=8, memory_bytes=1 << 34, memory_free_bytes=0, devices=gpus),
        }
        found.take(Sample(at, at, status, figures, {}))
    return found


def column(found: Board, choice: Choice, heading: str) -> list[str]:
    shown = table(found, choice)
    return [row[list(shown.headings).index(heading)] for row in shown.rows]


@pytest.mark.parametrize(
    ("view", "heading", "sort", "names"),
    [
        ("workers", "WORKER", "name", ["actor:0", "actor:1", "channel@a:0", "channel@b:0", "env:0"]),
        ("workers", "WORKER", "CPU", ["actor:1", "env:0", "actor:0", "channel@a:0", "channel@b:0"]),
        ("workers", "WORKER", "memory", ["actor:0", "env:0", "actor:1", "channel@a:0", "channel@b:0"]),
        ("workers", "WORKER", "GPU", ["env:0", "actor:1", "actor:0", "channel@a:0", "channel@b:0"]),
        ("workers", "WORKER", "depth", ["actor:0", "actor:1", "channel@a:0", "channel@b:0", "env:0"]),
        ("nodes", "NODE", "name", ["n0", "n1"]),
        ("nodes", "NODE", "CPU", ["n1", "n0"]),
        ("nodes", "NODE", "memory", ["n1", "n0"]),
        ("nodes", "NODE", "GPU", ["n1", "n0"]),
        ("channels", "CHANNEL", "name", ["a", "b"]),
        ("channels", "CHANNEL", "memory", ["a", "b"]),
        ("channels", "CHANNEL", "depth", ["b", "a"]),
    ],
)
def test_rows_are_sorted_by_each_order_and_then_by_name(view, heading, sort, names):
    assert column(cluster(), Choice(view, sort), heading) == names


def test_filter_keeps_rows_that_have_each_word():
    found = cluster()
    assert column(found, Choice(query="n1 ACTOR"), "WORKER") == ["actor:1"]
    assert column(found, Choice(query="step"), "WORKER") == ["actor:1"]
    assert column(found, Choice("nodes", query="10.0.0.1"), "NODE") == ["n1"]
    assert "'nothing'" in table(found, Choice(query="nothing")).empty


def test_cells_have_use_calls_and_accelerators():
    shown = table(cluster(), Choice(query="step"))
    assert shown.rows[0] == [
        "actor:1", "job", "n1", "running", "9", "90 %", "1.0 MiB", "1.0 GiB", "step", "90 s", "0", "-"
    ]  # fmt: skip
    node = table(cluster(), Choice("nodes", query="n1")).rows[0]
    assert node == [
        "1",
        "n1",
        "ready",
        "2",
        "50 %",
        "8",
        "16.0 GiB of 16.0 GiB",
        "-",
        "90 30",
        "20.0 GiB of 80.0 GiB",
        "-",
    ]
    assert headline(cluster()) == "nodes: 2 ready; workers: 5 running; 5.0 of 16 CPUs busy"


def test_processors_of_a_machine_with_two_nodes_count_once():
    found = Board()
    for at in (100.0, 105.0):
        nodes = {id: replace(one, machine="boot-id") for id, one in figures(at, 1).items()}
        assert len(nodes) == 2
        found.take(Sample(at, at, status(), nodes))
        if at == 100.0:  # a rate needs two samples
            assert "CPUs" not in headline(found)
            assert (summary(found, status())["busy"], list(found.cpu_history)) == (None, [])
    assert headline(found).endswith("32.0 of 64 CPUs busy")
    assert [summary(found, status())[name] for name in ("busy", "cpus")] == [32.0, 64]
    assert list(found.cpu_history) == [32.0]


def test_a_narrow_screen_leaves_out_empty_and_then_less_important_columns():
    whole = table(cluster(), Choice())
    assert whole.narrowed(200).headings == whole.headings
    assert list(whole.narrowed(90).headings) == [one for one in whole.headings if one != "FAULT"]
    narrow = whole.narrowed(40)
    assert list(narrow.headings) == ["WORKER", "CPU", "MEMORY", "METHOD", "FOR"]
    assert narrow.rows[1] == ("actor:1", "90 %", "1.0 MiB", "step", "90 s")
    assert table(Board(), Choice()).narrowed(1).rows == []


def test_unknown_figures_are_shown_as_unknown():
    found = Board()
    found.take(Sample(1.0, 1.0, cluster().last_status))
    assert column(found, Choice(), "CPU") == ["-"] * 5
    worker = report(found, "head")["workers"][0]
    assert (worker["cpu"], worker["rss_bytes"], worker["accelerator_bytes"]) == (None, None, None)
    assert "busy" not in headline(found)
    hostile = table(board(), Choice(query="rollout"))
    assert hostile.rows[0][-1] == "it is silent"


def test_a_worker_in_a_breakpoint_is_shown_with_the_command_that_attaches():
    found = board(place="train.py:42 in step")
    shown = table(found, Choice(query="breakpoint"))
    (row,) = (dict(zip(shown.headings, row, strict=True)) for row in shown.rows)
    assert (row["WORKER"], row["STATE"]) == ("rollout:1", "breakpoint")
    assert row["FAULT"] == "at train.py:42 in step for 60 s: rlinf-actors attach rollout:1 --job job-a"
    worker = report(found, "head")["workers"][1]
    assert (worker["state"], worker["breakpoint"]) == ("running", "train.py:42 in step")


def typed(text: str, choice: Choice | None = None) -> Choice | None:
    found = choice or Choice()
    for key in keys(text):
        found = pressed(found, key)
        if found is None:
            return None
    return found


def test_keys_choose_views_orders_and_filter():
    assert typed("2c") == Choice("nodes", "CPU")
    assert typed("\t\tg") == Choice("channels", "GPU")
    assert typed("\x1b[Dd") == Choice("channels", "depth")
    assert typed("/ac tor\x7f\r") == Choice(query="ac to")
    assert typed("/q") == Choice(query="q", typing=True), "a key is text of the filter"
    assert typed("/x\x15y\n\x1b") == Choice()
    assert typed("/x\x1b") == Choice()
    assert typed("/\x1b[A\x07é") == Choice(query="é", typing=True), "neither arrows nor control characters"
    assert typed("jj\x1b[Bk\x1b[6~").first == 12
    assert typed("k").first == 0
    assert [typed(end) for end in "qQ\x03\x04"] == [None] * 4
    assert len(typed("/" + "x" * 500).query) == 200
