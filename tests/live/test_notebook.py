"""What a notebook shows for a cluster, a group, a call, a channel, a placement and a plan: tables, without blocking."""

from __future__ import annotations

import os
import re
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path

import pace
import pytest
from channel_workers import host_pid
from notebook_page import page_of, shown_by

from rlinf_actors import Channel, ChannelBrokenError, Cluster, ComponentPlacement, NodePlacementStrategy, Worker
from rlinf_actors.channel import inspection
from rlinf_actors.placement.plan import plan
from rlinf_actors.shown import HTML_ROWS, html_table
from tests import pictures
from tests.browser import chromium

PICTURE = pictures.DOCS / "how-to" / "pictures" / "notebook.png"
VARIES = re.compile(r"/\S+|job-\w+|\d+")
CELLS = (
    "cluster = await Cluster.connect(num_nodes=1)\ncluster",
    'group = await Env.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="env")\ngroup',
    "group.execute_on(1)",
    "call = group.step()\nawait call\ncall",
    'channel = await Channel.create("items", maxsize=4, async_op=True)\n'
    'for item in "ab":\n    await channel.put(item, async_op=True)\nchannel',
    "ComponentPlacement(config, cluster)",
)
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


def parent_of(pid: int) -> int:
    (parent,) = re.findall(r"^PPid:\t(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(parent)


def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until every thread stands: one that runs goes on until the kernel interrupts it."""
    os.kill(pid, signal.SIGSTOP)
    for task in Path(f"/proc/{pid}/task").iterdir():
        while "\nState:\tT" not in (task / "status").read_text():
            os.sched_yield()


@pytest.mark.live
async def test_objects_show_themselves_on_the_event_loop_of_a_notebook(monkeypatch):
    monkeypatch.setattr(inspection, "SHOWN_S", pace.PATIENCE_S)  # a busy machine
    names = {"Channel": Channel, "Cluster": Cluster, "ComponentPlacement": ComponentPlacement, "Env": Env}
    names |= {"NodePlacementStrategy": NodePlacementStrategy, "config": CONFIG}
    tables = [await shown_by(code, names) for code in CELLS]
    cluster, group, channel = (names[name] for name in ("cluster", "group", "channel"))
    async with cluster:
        nodes, workers, view, done, items, placement = map(Reader, tables)
        (headings, node) = nodes.rows
        assert dict(zip(headings, node, strict=True))["rank"] == "0"
        assert workers.texts == ["WorkerGroup 'env' of 2 Env"]
        assert [row[:2] + row[3:4] for row in workers.rows[1:]] == [["0", "0", "running"], ["1", "0", "running"]]
        assert (view.texts, view.rows[1:]) == (["ranks [1] of group 'env'"], workers.rows[2:])
        assert [(row[0], row[2]) for row in done.rows[1:]] == [("env:0", "returned"), ("env:1", "returned")]
        assert {"maxsize": "4", "items": "2"}.items() <= dict(items.rows).items()
        assert placement.rows[1:] == [["env", "0:0-1", "2"]]
        assert shown(plan(CONFIG, cluster)).rows[1:] == [["env", "0:0-1", "2", "node"]]
        failed = group.step(fails=True)
        with pytest.raises(ValueError, match="rank 1"):
            await failed
        assert ("env:1", "failed") in [(row[0], row[2]) for row in shown(failed).rows]
        await channel.put(Sealed(), key="b", async_op=True)
        assert ["items", "3 under 2 keys"] in shown(channel).rows  # and no item was unpickled
        host = host_pid(channel)
        stop(host)
        monkeypatch.setattr(inspection, "SHOWN_S", 0.5)
        assert ["items", "not known: its process has not answered within 0.5 s"] in shown(channel).rows
        template = parent_of(host)
        stop(template)
        young = await Channel.create("young", async_op=True)
        assert ["items", "not known yet: its process is starting"] in shown(young).rows
        os.kill(template, signal.SIGCONT)
        os.kill(host, signal.SIGKILL)
        with pytest.raises(ChannelBrokenError):
            await channel.get(async_op=True)
        (broken,) = [cells[1] for cells in shown(channel).rows if cells[0] == "items"]
        assert "the process that held it died" in broken
    page = page_of([*zip(CELLS, tables, strict=True)])
    here = (os.uname().nodename, sys.executable, node[headings.index("hardware")])
    for found, shown_as in zip(here, ("lab", "/opt/venv/bin/python", "none"), strict=True):
        page = page.replace(f"<td>{found}</td>", f"<td>{shown_as}</td>")
    await check_picture(page)


async def check_picture(page: str) -> None:
    """Compare the words of the picture with those of *page*, apart from numbers and paths."""
    if pictures.MAKES:
        async with chromium() as browser:
            notebook = await browser.new_page(viewport={"width": 880, "height": 400}, device_scale_factor=1.25)
            await notebook.set_content(page)
            pictures.write_png(PICTURE, await notebook.screenshot(full_page=True), page)
    found, expected = (VARIES.sub("…", text) for text in (pictures.words_of_png(PICTURE), pictures.words(page)))
    assert found == expected, pictures.AGAIN


def test_text_of_users_is_escaped_and_long_tables_are_cut():
    table = Reader(html_table("<b>x</b>", ("<script>",), [(f"<td>\x1b{n}",) for n in range(HTML_ROWS + 5)]))
    assert table.texts == ["<b>x</b>", "and 5 more"]
    assert table.rows[:2] == [["<script>"], ["<td>\\x1b0"]]
    assert len(table.rows) == HTML_ROWS + 1


def test_a_channel_of_this_process_shows_its_items():
    channel: Channel[int] = Channel.create("mine", local=True)
    for item in range(3):
        channel.put(item)
    assert [row[1] for row in shown(channel).rows] == ["none: the items are in this process", "no limit", "3"]
    channel.close()
    assert ["items", "3 (closed)"] in shown(channel).rows
