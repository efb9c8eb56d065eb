"""What a notebook shows for a cluster, a group, a call, a channel, a placement and a plan: tables, without blocking."""

from __future__ import annotations

import asyncio
import os
import signal
from html.parser import HTMLParser

import pytest
from channel_workers import host_pid

from rlinf_actors import Channel, ChannelBrokenError, Cluster, ComponentPlacement, NodePlacementStrategy, Worker
from rlinf_actors.placement.plan import plan
from rlinf_actors.shown import HTML_ROWS, html_table

CONFIG = {"cluster": {"num_nodes": 1, "component_placement": {"env": {"node_group": "node", "placement": "0:0-1"}}}}


class Reader(HTMLParser):
    """The title and the cells of a table. Raises if a tag is not one of ours, or does not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "p"}
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.texts.append(data)


class Env(Worker):
    def step(self, fails: bool = False) -> int:
        if fails and self._rank == 1:
            raise ValueError("rank 1")
        return self._rank


class Sealed:
    """An item that no process may unpickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("an item was unpickled",)


def shown(value: object) -> Reader:
    """What IPython's display hook gets of *value*."""
    return Reader(value._repr_html_())  # type: ignore[attr-defined]


@pytest.mark.live
async def test_objects_show_themselves_on_the_event_loop_of_a_notebook():
    async with Cluster.connect(num_nodes=1) as cluster:
        (headings, node) = shown(cluster).rows
        assert dict(zip(headings, node, strict=True))["rank"] == "0"
        group = await Env.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="env")
        table = shown(group)
        assert table.texts == ["WorkerGroup 'env' of 2 Env"]
        assert [row[:2] + row[3:4] for row in table.rows[1:]] == [["0", "0", "running"], ["1", "0", "running"]]
        view = shown(group.execute_on(1))
        assert (view.texts, view.rows[1:]) == (["ranks [1] of group 'env'"], table.rows[2:])
        done = group.step()
        await done
        assert [(row[0], row[2]) for row in shown(done).rows[1:]] == [("env:0", "returned"), ("env:1", "returned")]
        failed = group.step(fails=True)
        with pytest.raises(ValueError, match="rank 1"):
            await failed
        assert ("env:1", "failed") in [(row[0], row[2]) for row in shown(failed).rows]
        channel = await asyncio.to_thread(Channel.create, "items", maxsize=4)
        assert {"maxsize": "4", "items": "0"}.items() <= dict(shown(channel).rows[1:]).items()
        for key in ("a", "a", "b"):
            await channel.put(Sealed(), key=key, async_op=True)
        assert ["items", "3 under 2 keys"] in shown(channel).rows  # and no item was unpickled
        host = host_pid(channel)
        os.kill(host, signal.SIGSTOP)
        assert ["items", "not known: the host has not answered within 0.5 s"] in shown(channel).rows
        os.kill(host, signal.SIGKILL)
        with pytest.raises(ChannelBrokenError):
            await channel.get(async_op=True)
        (broken,) = [cells[1] for cells in shown(channel).rows if cells[0] == "items"]
        assert "the host of channel 'items' died" in broken
        placement = ComponentPlacement(CONFIG, cluster)
        assert shown(placement).rows[1:] == [["env", "0:0-1", "2"]]
        planned = plan(CONFIG, cluster)
        assert shown(planned).rows[1:] == [["env", "0:0-1", "2", "node"]]
        planned_title = shown(planned).texts[0]
        assert planned_title.startswith("plan on 1 node, ")


def test_text_of_users_is_escaped_and_long_tables_are_cut():
    table = Reader(html_table("<b>x</b>", ("<script>",), [(f"<td>\x1b{n}",) for n in range(HTML_ROWS + 5)]))
    assert table.texts == ["<b>x</b>", "and 5 more"]
    assert table.rows[:2] == [["<script>"], ["<td>\\x1b0"]]
    assert len(table.rows) == HTML_ROWS + 1


def test_a_channel_of_this_process_shows_its_items():
    channel: Channel[int] = Channel.create("mine", local=True)
    for item in range(3):
        channel.put(item)
    assert [row[1] for row in shown(channel).rows[1:]] == ["none: the items are in this process", "no limit", "3"]
    channel.close()
    assert ["items", "3 (closed)"] in shown(channel).rows
