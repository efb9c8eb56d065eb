"""Output of real workers, in files and as reported lines."""

import os
import stat

import pytest
from workers_kit import children, order, spec

from rlinf_actors.wire.agent_messages import LogLines, WorkerExited

pytestmark = pytest.mark.live


async def test_both_streams_arrive_with_their_names_and_stay_in_files(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec(
            2, group="a b", do="print('out'); print('err', file=sys.stderr); os.write(1, b'\\xff no end'); os._exit(0)"
        )
        kids.start(order([one]))
        await reports.gone(one)
    assert sorted(reports.lines) == [
        ("a b:2", "err", "err"),
        ("a b:2", "out", "out"),
        ("a b:2", "out", "\ufffd no end"),
    ]
    (out,) = (tmp_path / "log" / "ns").glob("a_b-*-2.out")
    assert out.read_bytes() == b"out\n\xff no end"


async def test_all_lines_arrive_before_the_end_is_reported(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec(do="print('\\n'.join(map(str, range(20000)))); os._exit(0)")
        kids.start(order([one]))
        await reports.gone(one)
        assert isinstance(reports.order[-1], WorkerExited)
        assert [text for _, _, text in reports.lines] == [str(n) for n in range(20000)]


async def test_second_worker_of_a_name_shows_only_its_own_lines(tmp_path):
    async with children(tmp_path) as (kids, reports):
        for word in ("first", "second"):
            one = spec(do=f"print('{word}'); os._exit(0)")
            kids.start(order([one]))
            await reports.gone(one)
    assert [text for _, _, text in reports.lines] == ["first", "second"]
    assert (tmp_path / "log" / "ns" / "g-0.out").read_text() == "first\nsecond\n"


async def test_log_dir_of_the_launch_overrides_the_nodes(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec(do="print('here'); os._exit(0)", log_dir=str(tmp_path / "mine"), forward_logs=False)
        kids.start(order([one]))
        await reports.gone(one)
    assert (tmp_path / "mine" / "ns" / "g-0.out").read_text() == "here\n"
    modes = {path: stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("mine", "mine/ns")}
    assert modes == {"mine": 0o700, "mine/ns": 0o700}
    assert reports.lines == []


async def test_worker_without_log_credit_keeps_writing_to_its_file(tmp_path):
    size = 8 << 20
    do = f"for _ in range({size} >> 13): print('x' * 8191)\nos._exit(0)"
    async with children(tmp_path) as (kids, reports):
        reports.credit = False
        one = spec(do=do)
        kids.start(order([one]))
        await reports.gone(one)
        shown = sum(len(text) for _, _, text in reports.lines)
        assert (1 << 20) - (1 << 17) <= shown <= (1 << 20) + (1 << 17)
        assert (tmp_path / "log" / "ns" / "g-0.out").stat().st_size == size
        reports.credit = True
        kids.credit_logs(1 << 20, "ns")
        await reports.until(lambda: len(reports.lines) == size >> 13)


async def test_full_disk_never_blocks_the_worker(tmp_path):
    logs = tmp_path / "log" / "ns"
    logs.mkdir(parents=True)
    try:
        os.mknod(logs / "g-0.out", stat.S_IFCHR | 0o600, os.makedev(1, 7))  # /dev/full
    except PermissionError:
        pytest.skip("only root makes devices")
    async with children(tmp_path) as (kids, reports):
        one = spec(do="print('x' * (1 << 20)); print('err', file=sys.stderr); os._exit(0)")
        kids.start(order([one]))
        exit = await reports.gone(one)
    assert (exit.kind, exit.exit_code, exit.stderr_tail) == ("exited", 0, ["err"])
    assert "No space left on device" in exit.reason


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
async def test_log_file_that_is_no_regular_file_loses_output_only(tmp_path, kind):
    """Other users may write to the log directory: a FIFO does not block the template, and links are not followed."""
    logs, target = tmp_path / "log" / "ns", tmp_path / "target"
    logs.mkdir(parents=True)
    target.write_text("ours\n")
    made = {"directory": os.mkdir, "fifo": os.mkfifo, "link": lambda path: os.symlink(target, path)}
    made[kind](logs / "g-0.out")
    async with children(tmp_path) as (kids, reports):
        one, other = (spec(n, do=f"print('{word}'); os._exit(0)") for n, word in enumerate(("lost", "shown")))
        kids.start(order([one, other]))
        exit = await reports.gone(one)
        await reports.gone(other)
    assert f"output was lost: {logs}/g-0.out: " in exit.reason
    assert [text for name, _, text in reports.lines if name == "g:1"] == ["shown"]
    assert target.read_text() == "ours\n"


async def test_pipe_held_by_a_daemon_does_not_delay_the_end(tmp_path):
    do = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); print('bye'); os._exit(0)"
    async with children(tmp_path) as (kids, reports):
        one = spec(do=do)
        kids.start(order([one]))
        await reports.gone(one)
    assert [text for _, _, text in reports.lines] == ["bye"]


async def test_owners_do_not_wait_for_one_another(tmp_path):
    async with children(tmp_path) as (kids, reports):
        reports.credit = False
        loud = spec(0, do="print('x' * (2 << 20))", namespace="loud")
        quiet = spec(1, do="print('quiet')", namespace="quiet")
        kids.start(order([loud]))
        await reports.until(lambda: sum(len(text) for _, _, text in reports.lines) >= 1 << 20)
        kids.start(order([quiet]))
        await reports.line("quiet")
        assert {report.owner for report in reports.order if isinstance(report, LogLines)} == {"loud", "quiet"}
        assert os.listdir(tmp_path / "log") == ["loud", "quiet"] or len(os.listdir(tmp_path / "log")) == 2
