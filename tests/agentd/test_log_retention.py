"""Log files of ended workers: which are removed, and what keeps those of others."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from workers_kit import children, order, spec

from agentd import log_retention
from agentd.config_fields import Config
from agentd.log_retention import GIB, RECENT_S, Limits, LogRetention, WorkerFiles, removable
from agentd.logs import LogForwarder
from agentd.users import Users, as_user
from rlinf_actors.template.log_pump import LogPump

DAY_S = 86400.0
NOW = 1000 * DAY_S


def files(name, age_s, size=10, running=False):
    return WorkerFiles("job", [name], size, NOW - age_s, running=running)


@pytest.mark.parametrize(
    ("limits", "old", "many", "left"),
    [
        (Limits(), [], [], 50),
        (Limits(keep_s=3 * DAY_S), ["a", "b"], [], 30),
        (Limits(keep_s=5 * DAY_S), [], [], 50),
        (Limits(total_bytes=50), [], [], 50),
        (Limits(total_bytes=49), [], ["a"], 40),
        (Limits(total_bytes=25), [], ["a", "b", "c"], 20),
        (Limits(total_bytes=1), [], ["a", "b", "c"], 20),  # the others live, or ended just now
        (Limits(keep_s=4.5 * DAY_S, total_bytes=35), ["a"], ["b"], 30),
    ],
)
@pytest.mark.quick
def test_oldest_files_of_ended_workers_go_first(limits, old, many, left):
    found = [
        files("recent", RECENT_S / 2), files("b", 4 * DAY_S), files("c", 2 * DAY_S), files("a", 5 * DAY_S),
        files("lives", 9 * DAY_S, running=True),
    ]  # fmt: skip
    gone = removable(found, NOW, limits)
    assert ([one.names[0] for one in gone[0]], [one.names[0] for one in gone[1]], gone[2]) == (old, many, left)


def rights_of_threads():
    """Return the user ids with which threads of this process access files."""
    statuses = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    return {int(line.split()[4]) for status in statuses for line in status.splitlines() if line.startswith("Uid:")}


@pytest.fixture
def node(tmp_path):
    """A directory of log files, and a function that keeps it to limits."""
    users = SimpleNamespace(with_logs=list)
    site = SimpleNamespace(rules=SimpleNamespace(log_dir=str(tmp_path)), users=users)
    workers: dict[str, object] = {}

    def write(path, age_s=0.0, size=4096):
        path = tmp_path / path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    def keep(**limits):
        async def once():
            loop = asyncio.get_running_loop()
            logs = LogForwarder(loop, "n0", lambda lines: None, lambda *read: None)
            retention = LogRetention(loop, site, workers, logs)
            retention._limits = Limits(**limits)
            await retention.keep_to_limits()
            assert rights_of_threads() == {os.getuid()}, "a thread that was started as a user keeps that user's rights"
            retention.close()

        asyncio.run(once())
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}

    return SimpleNamespace(write=write, keep=keep, workers=workers, place=tmp_path, site=site)


@pytest.mark.quick
def test_all_parts_of_a_workers_output_go_and_other_files_stay(node):
    for name in ("g-0.out", "g-0.out.1", "g-0.out.marks", "g-0.out.1.marks", "g-0.err", "g-0.err.new", "g-0.nsys-rep"):
        node.write(f"job/{name}", 2 * DAY_S)
    node.write("other/g-0.out", 2 * DAY_S)
    (node.place / "link").symlink_to(node.place / "elsewhere")
    node.write("elsewhere/deep", 2 * DAY_S)
    os.symlink(node.place / "elsewhere/deep", node.place / "elsewhere/g-9.out")
    assert node.keep(keep_s=DAY_S) == {"job/g-0.nsys-rep", "elsewhere/deep", "elsewhere/g-9.out"}
    assert not (node.place / "other").exists(), "an empty directory of a job goes too"
    assert (node.place / "elsewhere/g-9.out").is_symlink(), "links are not followed"


@pytest.mark.quick
def test_files_of_workers_of_this_agentd_stay(node):
    out, err = node.write("job/g-0.out", 9 * DAY_S), node.write("job/g-0.err", 9 * DAY_S)
    node.write("job/g-1.out", 9 * DAY_S)
    node.workers["w"] = SimpleNamespace(plan=SimpleNamespace(out_path=str(out), err_path=str(err)))
    assert node.keep(keep_s=DAY_S, total_bytes=1) == {"job/g-0.out", "job/g-0.err"}
    node.workers.clear()
    assert node.keep(keep_s=DAY_S) == set()


@pytest.mark.quick
def test_file_that_another_agentds_template_writes_stays(node):
    """Agentds of one user share a directory of log files, also on different machines by NFS."""
    pump = LogPump(str(node.place / "g-0.out"), limit=4096)
    (node.place / "job").mkdir()
    os.rename(node.place / "g-0.out", node.place / "job/g-0.out")
    pump.path = str(node.place / "job/g-0.out")
    node.write("job/g-0.err", 9 * DAY_S)
    os.utime(node.place / "job/g-0.out", (1, 1))
    assert node.keep(keep_s=DAY_S) == {"job/g-0.out", "job/g-0.err"}
    for _ in range(2):  # the second begins a new file, which is locked too
        os.write(pump.writer, b"x" * 4000 + b"\n")
        pump.pump()
    times = {path.name for path in (node.place / "job").iterdir()}
    assert "g-0.out.1" in times
    for path in (node.place / "job").iterdir():
        os.utime(path, (1, 1))
    assert {path.rpartition("/")[2] for path in node.keep(keep_s=DAY_S)} == times
    pump.close()
    assert node.keep(keep_s=DAY_S) == set()


@pytest.mark.quick
def test_total_is_told_where_living_workers_have_it_all(node, caplog):
    out = node.write("job/g-0.out", size=1 << 20)
    node.workers["w"] = SimpleNamespace(plan=SimpleNamespace(out_path=str(out), err_path=""))
    with caplog.at_level(logging.INFO, log_retention.log.name):
        node.write("job/g-1.out", DAY_S, size=1 << 20)
        assert node.keep(total_bytes=1 << 19) == {"job/g-0.out"}
    assert "removed the log files of 1 ended workers, 1.0 MiB: the oldest beyond" in caplog.text
    assert "more than workers.log_total_max_gb" in caplog.text


@pytest.mark.quick
def test_files_that_cannot_be_removed_are_told_once(node, caplog, monkeypatch):
    for number in range(3):
        node.write(f"job/g-{number}.out", 9 * DAY_S)

    def refuse(path):
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "unlink", refuse)
    assert len(node.keep(keep_s=DAY_S)) == 3
    (record,) = caplog.records
    assert "the log files of 3 ended workers are not removed: [Errno 1] Operation not permitted" in record.getMessage()
    caplog.clear()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_files_of_another_user_are_removed_with_that_users_rights(node):
    """A user may put links into the directory; they lead nowhere. The user need not have started a worker yet."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o711)
        config = Config(users={"*": "nobody"})
        user = Users(config, f"{place}/run", f"{place}/log").named("nobody")
        job, elsewhere = f"{user.log_dir}/job", node.write("elsewhere/g-0.out", 9 * DAY_S)
        old = [f"old-{number}.out" for number in range(20)]
        with as_user(user):
            os.mkdir(job)
            for name in (*old, "g-1.out"):
                with open(f"{job}/{name}", "w") as file:
                    file.write("said")
            os.symlink(elsewhere.parent, f"{user.log_dir}/other")
            for name in old:
                os.utime(f"{job}/{name}", (1, 1))
        node.site.users = Users(config, f"{place}/run", f"{place}/log")  # of the next agentd
        node.site.rules.log_dir = f"{place}/log"
        node.keep(keep_s=DAY_S)
        assert os.listdir(job) == ["g-1.out"]
        assert elsewhere.exists()
        assert os.geteuid() == 0


@pytest.mark.quick
def test_limits_are_days_and_gib():
    config = SimpleNamespace(log_keep_days=2.0, log_total_max_gb=0.5)
    assert Limits.of(config) == Limits(2 * DAY_S, GIB // 2)


@pytest.mark.quick
def test_file_that_cannot_be_locked_stays(node):
    path = node.write("job/g-0.out", 9 * DAY_S)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert node.keep(keep_s=DAY_S) == {"job/g-0.out"}
    assert node.keep(keep_s=DAY_S) == set()


@pytest.mark.live
async def test_living_worker_keeps_its_output_and_an_ended_one_loses_it(tmp_path):
    async with children(tmp_path) as (kids, reports):
        ended, lives = spec(0, do="print('bye', flush=True)"), spec(1, do="print('hi', flush=True)")
        kids.start(order([ended, lives]))
        await reports.line("hi")
        await reports.line("bye")
        kids.stop([ended.id], 0.0)
        await reports.gone(ended)
        logs = tmp_path / "log/ns"
        for path in logs.iterdir():
            os.utime(path, (1, 1))
        kids.log_retention._limits = Limits(keep_s=DAY_S)
        await kids.log_retention.keep_to_limits()
        assert {path.name.removesuffix(".marks") for path in logs.iterdir()} == {"g-1.out", "g-1.err"}
        assert (logs / "g-1.out").read_text() == "hi\n"
