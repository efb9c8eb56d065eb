"""Reading of logs: lines, cuts, credit. Real files, without processes or a running loop."""

import asyncio
import os

import pace
import pytest
from held_entries import growing
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import VirtualLoop

from agentd.logs import CUT, MAX_LINE, WINDOW, LogForwarder, OutputFile, _where, split
from rlinf_actors.wire.agent_messages import UPDATE, OutputLost


@pytest.mark.parametrize(
    ("data", "final", "lines", "size"),
    [
        (b"", False, [], 0),
        (b"one\ntwo", False, ["one"], 4),
        (b"one\ntwo", True, ["one", "two"], 7),
        (b"one\r\n\r\ntwo\n", False, ["one", "", "two"], 11),
        (b"\r 10%\r 20%", False, [" 10%" + UPDATE], 6),
        (b"\r 10%\r 20%\r 30%\r", False, [" 20%" + UPDATE], 11),
        (b"\r 10%\r100%\nnext", False, ["100%"], 11),
        (b"one\n 10%\r100%", True, ["one", "100%"], 13),
        (b"wait\r", False, [], 0),
        (b"wait\r", True, ["wait"], 5),
        (b"\xff\xfe\n", False, ["\ufffd\ufffd"], 3),
        (b"x" * MAX_LINE, False, ["x" * MAX_LINE + CUT], MAX_LINE),
        (b"x" * (MAX_LINE - 1) + "é".encode(), False, ["x" * (MAX_LINE - 1) + CUT], MAX_LINE - 1),
        (b"x" * (MAX_LINE - 3) + "😀".encode(), False, ["x" * (MAX_LINE - 3) + CUT], MAX_LINE - 3),
        (b"x" * (MAX_LINE - 2) + "é".encode(), False, ["x" * (MAX_LINE - 2) + "é" + CUT], MAX_LINE),
    ],
)
def test_split_cuts_data_into_lines(data, final, lines, size):
    assert split(data, final) == (lines, size)


@given(st.binary(max_size=400), st.integers(1, 50))
def test_split_in_pieces_gives_the_same_lines(data, step):
    whole = split(data, True)[0]
    pieces, rest = [], b""
    for at in range(0, len(data), step):
        rest += data[at : at + step]
        lines, size = split(rest)
        pieces += lines
        rest = rest[size:]
    assert settled(pieces + split(rest, True)[0]) == settled(whole)


def settled(lines):
    """The lines that a terminal shows at the end: only the last state of a progress bar."""
    shown = []
    for line in lines:
        if shown and shown[-1].endswith(UPDATE):
            shown.pop()
        shown.append(line)
    return shown


class Kit:
    def __init__(self, tmp_path, loop):
        self.loop = loop
        self.reports, self.reads, self.dir = [], [], tmp_path / "ns"
        self.lost: list[OutputLost] = []
        self.answered = asyncio.Event()
        self.logs = LogForwarder(self.loop, "n0", self._reported, self._read)

    def _reported(self, report):
        if isinstance(report, OutputLost):
            self.lost.append(report)
            return
        self.reports.append(report)
        if report.final:
            self.answered.set()

    def _read(self, id, out, err, to_end):
        self.reads += [id] * to_end

    def add(self, id="w", owner="ns", keep=False):
        self.dir.mkdir(exist_ok=True)
        self.logs.add(id, f"{id}:0", owner, str(self.dir / f"{id}.out"), str(self.dir / f"{id}.err"), keep=keep)
        return self.dir / f"{id}.out"

    def lines(self):
        return [text for report in self.reports for _, _, text in report.entries]

    def cost(self):
        return sum(report.cost for report in self.reports)

    def final(self):
        """Wait for the answer of the flush and return it."""
        self.loop.run_until_complete(asyncio.wait_for(self.answered.wait(), pace.PATIENCE_S))
        return next(report for report in self.reports if report.final)

    def turns(self):
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()


def append(path, text):
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def kit(tmp_path):
    kit = Kit(tmp_path, asyncio.new_event_loop())
    yield kit
    kit.logs.close()
    kit.loop.close()


@pytest.fixture
def virtual_kit(tmp_path):
    kit = Kit(tmp_path, VirtualLoop())
    yield kit
    kit.logs.close()
    kit.loop.close()


def test_only_new_lines_are_read_and_an_unfinished_line_waits(kit):
    kit.dir.mkdir()
    (kit.dir / "w.out").write_text("before\n")
    out = kit.add()
    append(out, "one\ntw")
    kit.logs.grew(["w", "unknown"])
    assert kit.lines() == ["one"]
    assert kit.reads == ["w"]
    append(out, "o\n")
    kit.logs.grew(["w"])
    assert kit.lines() == ["one", "two"]


def test_unacknowledged_output_stays_within_the_window(kit):
    out = kit.add()
    out.write_text(("x" * 1023 + "\n") * 4096)
    kit.logs.grew(["w"])
    for _ in range(20):
        kit.turns()
    shown = kit.cost()
    assert WINDOW <= shown < WINDOW + 2 * MAX_LINE
    assert kit.reads == []
    kit.logs.credit(100 * WINDOW, "ns")
    for _ in range(20):
        kit.turns()
    assert WINDOW <= kit.cost() - shown < WINDOW + 2 * MAX_LINE, "credit never exceeds the window"
    while not kit.reads:
        kit.logs.credit(WINDOW, "ns")
        kit.turns()
    assert len(kit.lines()) == 4096


def test_empty_lines_cost_credit_too(kit):
    """Without a cost, the output of `yes ''` would be sent without limit and fill the driver's memory."""
    out = kit.add()
    out.write_bytes(b"\n" * (8 * MAX_LINE))
    kit.logs.grew(["w"])
    for _ in range(20):
        kit.turns()
    assert len(kit.lines()) == MAX_LINE, "one chunk took more than the window"
    assert kit.reads == []
    kit.logs.credit(kit.cost(), "ns")
    while len(kit.lines()) < 2 * MAX_LINE:
        kit.turns()


def test_unreadable_file_is_reported_to_its_owner_once(kit):
    out = kit.add()
    out.mkdir()
    kit.logs.grew(["w"])
    kit.logs.grew(["w"])
    assert kit.lines() == [f"[rlinf-actors] output cannot be shown: {out}: is no regular file"]
    assert kit.reads == ["w", "w"], "the file is read again when it has grown"
    out.rmdir()
    out.write_text("now\n")
    kit.logs.grew(["w"])
    assert kit.lines()[1:] == ["now"]


def test_credit_returned_during_a_report_is_used_later(tmp_path):
    """As while the head is away: the lines are dropped and their credit returned."""
    kit = Kit(tmp_path, asyncio.new_event_loop())

    def dropped(report):
        kit.reports.append(report)
        kit.logs.credit(report.cost, report.owner)

    kit.logs = LogForwarder(kit.loop, "n0", dropped, kit._read)
    out = kit.add()
    out.write_text("short\n" + ("x" * 1023 + "\n") * 4096)
    kit.logs.grew(["w"])
    while not kit.reads:
        kit.turns()
    assert len(kit.lines()) == 4097
    kit.logs.close()
    kit.loop.close()


def test_truncated_file_is_noted_and_read_from_its_start(kit):
    out = kit.add()
    out.write_text("one\ntwo\n")
    kit.logs.grew(["w"])
    out.write_text("new\n")
    kit.logs.grew(["w"])
    assert kit.lines() == ["one", "two", "new"]
    assert [report.skipped for report in kit.reports] == [0, 1]


def test_rest_of_an_ended_workers_output_waits_for_credit(kit):
    out = kit.add()
    out.write_text(("x" * 1023 + "\n") * 2048 + "last")
    kit.logs.finish("w")
    assert len(kit.lines()) < 2048
    kit.logs.credit(WINDOW, "ns")
    kit.turns()
    kit.logs.credit(WINDOW, "ns")
    for _ in range(5):
        kit.turns()
    assert kit.lines()[-1] == "last"
    assert kit.reads == ["w"]


def test_long_line_comes_in_pieces(kit):
    out = kit.add()
    out.write_text("x" * (MAX_LINE + 10) + "\nnext\n")
    kit.logs.grew(["w"])
    assert kit.lines() == ["x" * MAX_LINE + CUT, "x" * 10, "next"]


def test_rotated_file_is_read_on_from_its_position(kit):
    path = kit.add()
    path.write_text("one\ntwo\n")
    kit.logs.grew(["w"])
    append(path, "three\nfour, no end")
    rotate(path, "five\n")
    kit.logs.grew(["w"])
    assert kit.lines() == ["one", "two", "three", "four, no end", "five"]
    assert sum(report.skipped for report in kit.reports) == 0
    rotate(path, "six\n")
    rotate(path, "seven\n")
    kit.logs.grew(["w"])
    assert kit.lines()[5:] == ["seven"]
    assert sum(report.skipped for report in kit.reports) == 1, "a file renamed twice is lost, and its loss is reported"


def rotate(path, text):
    """Rotate the file as a Drain of the template does."""
    begun = path.with_suffix(".new")
    begun.write_text(text)
    path.rename(f"{path}.1")
    begun.rename(path)


def test_lost_output_is_reported_to_its_owner(kit):
    kit.add()
    kit.logs.lost("w", "/log/w.out: No space left on device")
    kit.logs.lost("w", "")
    kit.logs.lost("gone", "whatever")
    assert kit.lost == [OutputLost("w", "/log/w.out: No space left on device"), OutputLost("w")]
    first, second = kit.lines()
    assert first.startswith("[rlinf-actors] output is lost: /log/w.out: No space left")
    assert second == "[rlinf-actors] output is written again"


def test_nothing_is_kept_of_workers_whose_output_was_sent(kit):
    def run_job(n):
        kit.reports.clear()
        kit.reads.clear()
        for id in (f"{n}-0", f"{n}-1"):
            kit.add(id, f"job{n}").write_text("one\ntwo")
            kit.logs.grew([id])
            kit.logs.lost(id, "the disk is full")
            kit.logs.finish(id)
        kit.logs.credit(kit.cost(), f"job{n}")
        kit.logs.flush(f"job{n}", 1000.0)
        kit.turns()
        assert kit.reports[-1].final

    assert growing(kit.logs, run_job, 5) == {}


class TestFlush:
    """At its end, an owner gets its workers' output, or the number of lines that it misses."""

    def test_flush_without_unread_output_is_answered_at_once(self, kit):
        out = kit.add()
        out.write_text("one\ntwo, no end")
        kit.logs.finish("w")
        kit.logs.flush("ns", 1000.0)
        assert kit.lines() == ["one", "two, no end"]
        assert kit.reports[-1].final
        assert kit.reports[-1].left == 0

    def test_flush_of_an_unknown_owner_is_answered_at_once(self, kit):
        kit.logs.flush("stranger", 1000.0)
        assert [(report.owner, report.final, report.left) for report in kit.reports] == [("stranger", True, 0)]

    def test_flush_continues_as_credit_arrives(self, kit):
        out = kit.add()
        out.write_text(("x" * 1023 + "\n") * 4096)
        kit.logs.finish("w")
        kit.logs.flush("ns", 1000.0)
        while not kit.reports[-1].final:
            kit.logs.credit(WINDOW, "ns")
            kit.turns()
        assert len(kit.lines()) == 4096
        assert kit.reports[-1].left == 0

    def test_flush_of_output_that_may_not_be_left_out_waits_as_long_as_credit_comes(self, virtual_kit):
        kit = virtual_kit
        wait_s = 0.2
        kit.add(keep=True).write_text(("x" * 1023 + "\n") * 4096)
        kit.logs.finish("w")
        assert kit.logs._workers["w"].drop is None, "its output waits for the driver"
        kit.logs.flush("ns", wait_s)

        async def slow_driver():
            while not kit.reports[-1].final:
                await asyncio.sleep(wait_s / 2)
                kit.logs.credit(WINDOW, "ns")

        began = kit.loop.time()
        kit.loop.run_until_complete(asyncio.wait_for(slow_driver(), pace.PATIENCE_S))
        assert kit.loop.time() - began > wait_s
        assert (len(kit.lines()), kit.reports[-1].left) == (4096, 0)

    def test_flush_counts_unread_lines_and_names_their_file(self, kit):
        out = kit.add()
        out.write_text(("x" * 1023 + "\n") * 4096 + "last, no end")
        kit.logs.finish("w")
        kit.logs.flush("ns", 0.0)
        final = kit.final()
        assert len(kit.lines()) + final.left == 4097
        assert final.where == str(out)
        assert kit.reads == ["w"], "the template may forget the worker"

    def test_flush_names_the_directory_of_several_workers_files(self, kit):
        for name in ("v", "w"):
            kit.add(name).write_text(("x" * 1023 + "\n") * 4096)
            kit.logs.finish(name)
        kit.logs.flush("ns", 0.0)
        final = kit.final()
        assert len(kit.lines()) + final.left == 2 * 4096
        assert final.where == str(kit.dir)

    def test_flush_counts_lines_of_rotated_files_too(self, kit):
        out = kit.add()
        out.write_text(("x" * 1023 + "\n") * 4096)
        kit.logs.grew(["w"])
        rotate(out, "five\nsix\n")
        kit.logs.finish("w")
        kit.logs.flush("ns", 0.0)
        assert len(kit.lines()) + kit.final().left == 4098

    def test_flush_affects_its_own_owner_only(self, kit):
        mine, other = kit.add("v", "mine"), kit.add("w", "other")
        for out in (mine, other):
            out.write_text("one\n")
        kit.logs.finish("v")
        kit.logs.flush("mine", 1000.0)
        assert [(report.owner, report.final) for report in kit.reports] == [("mine", False), ("mine", True)]


def test_ending_agent_reports_unread_lines(kit):
    out = kit.add()
    out.write_text(("x" * 1023 + "\n") * 4096)
    kit.logs.finish("w")
    shown = len(kit.lines())
    kit.logs.end()
    assert (kit.reports[-1].left, kit.reports[-1].where, kit.reports[-1].final) == (4096 - shown, str(out), False)


def test_paths_that_have_no_directory_in_common_do_not_end_agentd():
    """A template names them. agentd ends if a task of its own fails."""
    assert _where(["/log/ns/out", "relative/out"]) == "/log/ns"
    assert _where(["a/out", "b/out"]) == "a/out"


@pytest.mark.timeout(20)
def test_lines_of_a_file_of_any_size_are_counted_soon(tmp_path):
    """A worker can make its log file as long as the file system allows, by a hole; agentd would never end."""
    path = tmp_path / "huge"
    path.write_text("a line\n")
    os.truncate(path, 1 << 40)
    assert OutputFile(str(path), "out", 0).left() == 2
