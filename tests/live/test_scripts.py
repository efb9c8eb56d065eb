"""Drivers as whole programs: what they print, how they exit, and that nothing remains of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import live_workers as lw
import pace
import pytest

from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

HEADER = """
import sys, os
from rlinf_actors import Channel, Cluster, Worker

class Mine(Worker):
    def __init__(self):
        super().__init__()

    def say(self, text, stream="out"):
        print(text, file=sys.stdout if stream == "out" else sys.stderr, flush=True)

    def log(self, text):
        self.log_info(text)

    def add(self, x):
        return x + self._rank

    def bad(self):
        raise ValueError("nobody looks")

    def chatter(self, n):
        for k in range(n):
            print(f"line {k}")
"""


def run(tmp_path, body, **env):
    return lw.run_script(tmp_path, HEADER + lw.dedent(body), **env)


@pytest.fixture(scope="module")
def head():
    """Variables with which scripts share one cluster, where the claim is not about private ones."""
    with LocalCluster(1) as local:
        yield local.driver_env


def test_class_of_the_script_can_be_launched(tmp_path):
    done = run(
        tmp_path,
        """
        if __name__ == "__main__":
            group = Mine.create_group().launch(Cluster(num_nodes=1))
            print(group.add(41).wait())
        """,
    )
    assert (done.returncode, done.stdout) == (0, "[41]\n"), done.stderr


def test_script_with_closed_standard_descriptors_works(tmp_path):
    done = tmp_path / "done"
    path = lw.script(
        tmp_path,
        HEADER
        + lw.dedent(f"""
            with Cluster(num_nodes=1) as cluster:
                group = Mine.create_group().launch(cluster)
                group.say("nobody reads this").wait()
                open({str(done)!r}, "w").write(str(group.add(41).wait()))
        """),
    )
    closed = "exec 0<&- 1>&- 2>&-"
    subprocess.run(["bash", "-c", f"{closed}; exec {sys.executable} {path}"], env=lw.SCRIPT_ENV, check=True)
    assert done.read_text() == "[41]"


def test_a_module_beside_the_script_is_importable_in_workers(tmp_path, head):
    (tmp_path / "beside.py").write_text(
        "from rlinf_actors import Worker\nclass B(Worker):\n    def f(self): return 7\n"
    )
    done = run(
        tmp_path, "import beside\nprint(beside.B.create_group().launch(Cluster(num_nodes=1)).f().wait())", **head
    )
    assert (done.returncode, done.stdout) == (0, "[7]\n"), done.stderr


class TestOutput:
    def test_lines_reach_the_drivers_terminal_with_their_origin(self, tmp_path):
        done = run(
            tmp_path,
            """
            with Cluster(num_nodes=1) as cluster:
                group = Mine.create_group().launch(cluster, name="talkers")
                group.say("to stdout").wait()
                group.say("to stderr", "err").wait()
                group.log("logged").wait()
            """,
        )
        assert done.returncode == 0, done.stderr
        node = os.uname().nodename
        assert f"[talkers:0@{node}] to stdout\n" in done.stdout
        assert f"[talkers:0@{node}] to stderr\n" in done.stderr
        logged = [line for line in done.stderr.splitlines() if line.endswith("] logged")]
        assert len(logged) == 1
        assert logged[0].startswith(f"[talkers:0@{node}] [INFO ")

    def test_every_line_is_shown_at_the_end_of_the_driver(self, tmp_path, head):
        done = run(
            tmp_path,
            """
            with Cluster(num_nodes=1) as cluster:
                Mine.create_group().launch(cluster, name="g").chatter(3000).wait()
            """,
            **head,
        )
        lines = [line for line in done.stdout.splitlines() if "] line " in line]
        assert len(lines) == 3000, done.stderr
        assert lines[-1].endswith("line 2999")

    def test_the_end_waits_for_output_and_counts_what_it_leaves_out(self, tmp_path):
        """A terminal that is slower than the workers: it shows a part, and the files have the rest."""
        source = HEADER + lw.dedent("""
            with Cluster(num_nodes=1) as cluster:
                Mine.create_group().launch(cluster, name="g").chatter(200_000).wait()
                os.write(3, b"x")
        """)
        lines = 200_000
        read, write = os.pipe()
        env = {**lw.SCRIPT_ENV, "RLINF_ACTORS_KEPT_LOGS": str(tmp_path / "kept"), "RLINF_ACTORS_LOG_RATE": "0"}
        with subprocess.Popen(
            ["bash", "-c", f"exec {sys.executable} {lw.script(tmp_path, source)} 3>&{write}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(write,),
            env=env,
            text=True,
        ) as driver:
            os.close(write)
            assert os.read(read, 1) == b"x"  # nothing was read from the driver's stdout so far
            os.close(read)
            assert driver.stderr is not None
            said = driver.stderr.readline()
            while "left out" not in said:
                line = driver.stderr.readline()
                assert line, said
                said += line
            assert driver.stdout is not None
            shown = driver.stdout.read().count("line ")
        assert " has all" in said
        kept = next((tmp_path / "kept").rglob("g-0.out"))
        assert str(kept.parent) in said
        assert kept.read_text().count("\n") == lines
        left = sum(int(line.split()[1].replace(",", "")) for line in said.splitlines() if "left out" in line)
        assert shown + left >= lines

    def test_an_unfinished_last_line_is_shown(self, tmp_path, head):
        done = run(
            tmp_path,
            """
            class Unfinished(Mine):
                def say(self):
                    print("no end", end="")
            with Cluster(num_nodes=1) as cluster:
                Unfinished.create_group().launch(cluster, name="g").say().wait()
            """,
            **head,
        )
        assert "] no end\n" in done.stdout, done.stderr

    def test_logs_of_a_cluster_are_kept_when_something_failed_there(self, tmp_path):
        body = """
            with Cluster(num_nodes=1) as cluster:
                group = Mine.create_group().launch(cluster, name="g")
                group.say("before").wait()
                channel = Channel.create("c1")
                channel.put(1)
                channel.close()
                channel.get()
                channel._backend._group.gone.wait()  # an orderly end of its host
                {end}
        """
        env = {"RLINF_ACTORS_KEPT_LOGS": str(tmp_path / "kept")}
        done = run(tmp_path, body.format(end="sys.exit()"), **env)
        assert (done.returncode, done.stderr) == (0, "")
        assert not (tmp_path / "kept").exists()
        done = run(tmp_path, body.format(end="group.bad(); group.say('after').wait()"), **env)
        assert f"are kept in {tmp_path / 'kept'}" in done.stderr
        assert "because a call failed whose result nobody took" in done.stderr
        assert [path.read_text() for path in (tmp_path / "kept").rglob("g-0.out")] == ["before\nafter\n"]

    def test_logs_are_kept_when_the_script_failed_in_an_async_with_block(self, tmp_path):
        done = run(
            tmp_path,
            """
            import asyncio
            async def main():
                async with Cluster.connect(num_nodes=1):
                    raise RuntimeError("the arm is gone")
            asyncio.run(main())
            """,
            RLINF_ACTORS_KEPT_LOGS=str(tmp_path / "kept"),
        )
        why = "its script failed: RuntimeError: the arm is gone"
        assert f"are kept in {tmp_path / 'kept'}" in done.stderr
        assert f" because {why}\n" in done.stderr
        assert [path.read_text() for path in (tmp_path / "kept").rglob("reason.txt")] == [f"{why}\n"]

    def test_log_directory_has_the_files_of_workers(self, tmp_path, head):
        done = run(
            tmp_path,
            f"""
            with Cluster(num_nodes=1, namespace="ns", distributed_log_dir={str(tmp_path / "logs")!r}) as cluster:
                group = Mine.create_group().launch(cluster, name="talkers")
                group.say("kept").wait()
                group.say("kept too", "err").wait()
            """,
            RLINF_LOG_LEVEL="INFO",
            **head,
        )
        assert done.returncode == 0, done.stderr
        found = {str(path.relative_to(tmp_path)): path.read_text() for path in (tmp_path / "logs").rglob("*.*")}
        assert found == {"logs/talkers/rank_0.log": "kept\nkept too\n"}
        assert f"driver writes the output of group 'talkers' to {tmp_path / 'logs'}, as its own user" in done.stderr

    def test_worker_that_a_signal_ends_prints_its_stack_on_request(self, tmp_path, head):
        body = """
            import signal
            class Hangs(Mine):
                def where_it_hangs(self):
                    os.kill(os.getpid(), signal.SIGQUIT)
                    signal.pause()
            with Cluster(num_nodes=1) as cluster:
                Hangs.create_group().launch(cluster, catch_system_failure={catch}).where_it_hangs().wait()
            """
        for catch, env in ((True, {}), (None, {"RLINF_CATCH_FAILURE": "1"})):
            done = run(tmp_path, body.format(catch=catch), **head, **env)
            assert done.returncode == 1
            assert "SIGQUIT" in done.stderr
            assert "in where_it_hangs" in done.stderr

    def test_output_of_a_group_can_be_switched_off(self, tmp_path, head):
        done = run(
            tmp_path,
            f"""
            with Cluster(num_nodes=1, distributed_log_dir={str(tmp_path / "logs")!r}) as cluster:
                Mine.create_group().launch(cluster, name="q", disable_distributed_log=True).say("quiet").wait()
                Mine.create_group().launch(cluster, name="l").say("loud").wait()
            """,
            **head,
        )
        assert "loud" in done.stdout
        assert "quiet" not in done.stdout
        assert [path.name for path in (tmp_path / "logs").iterdir()] == ["l"]


class TestExitCodes:
    @pytest.mark.parametrize(
        ("body", "code"),
        [
            ("pass", 0),
            ("group.add(1).wait()", 0),
            ("sys.exit(3)", 3),
            ("result = group.bad()\ngroup.add(1).wait()", 1),
            ("group.bad()\ngroup.add(1).wait()\ncluster.shutdown()", 1),
            ("result = group.bad()\ngroup.add(1).wait()\nsys.exit(3)", 3),
            ("try:\n    group.bad().wait()\nexcept ValueError: pass", 0),
            ("group.bad().wait()", 1),
            ("group.add(1).cancel()", 0),
        ],
    )
    def test_exit_codes_of_scripts_show_failures(self, tmp_path, head, body, code):
        done = run(
            tmp_path,
            "cluster = Cluster(num_nodes=1)\ngroup = Mine.create_group().launch(cluster)\ngroup.wait_ready()\n"
            + body
            + '\nprint("end of the script")',
            **head,
        )
        assert done.returncode == code, done.stderr
        if "bad" in body and "try" not in body:
            assert "nobody looks" in done.stderr

    def test_lost_errors_may_be_logged_only(self, tmp_path, head):
        body = """
            cluster = Cluster(num_nodes=1)
            group = Mine.create_group().launch(cluster)
            result = group.bad()
            group.add(1).wait()
        """
        done = run(tmp_path, body, **head, RLINF_ACTORS_LOST_ERRORS="log")
        assert done.returncode == 0
        assert "nobody looks" in done.stderr

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("result = Mine.create_group().launch(cluster).bad()", "bad() in worker_group_Mine:0"),
            ("group = Broken.create_group().launch(cluster)", "group 'worker_group_Broken' could not be brought up"),
        ],
    )
    def test_a_failure_is_reported_while_the_driver_blocks_elsewhere(self, tmp_path, head, body, said):
        source = """
            class Broken(Mine):
                def __init__(self):
                    raise ValueError("nobody looks")
            cluster = Cluster(num_nodes=1)
            {body}
            sys.stdin.readline()
        """
        path = lw.script(tmp_path, HEADER + lw.dedent(source.format(body=body)))
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, path], text=True, env={**lw.SCRIPT_ENV, **head}, **pipes) as driver:
            lines = [driver.stderr.readline()]
            while "ValueError: nobody looks" not in lines[-1]:
                lines.append(driver.stderr.readline())
                assert lines[-1], lines  # else the driver has ended
            assert said in "".join(lines)
            driver.stdin.close()
            assert "nobody looks" in "".join(lines)
            assert driver.wait(pace.PATIENCE_S) == 1
            rest = driver.stderr.read()
        assert rest.count("could not be brought up") + rest.count("bad() in") == 0, rest

    def test_unseen_failed_launch_sets_the_exit_code(self, tmp_path, head):
        done = run(
            tmp_path,
            """
            class Broken(Mine):
                def __init__(self):
                    raise RuntimeError("no arm")
            cluster = Cluster(num_nodes=1)
            group = Broken.create_group().launch(cluster)
            group.add(1).wait()
            """,
            **head,
        )
        assert done.returncode == 1
        assert "RuntimeError: " in done.stderr
        assert "no arm" in done.stderr

    def test_constructors_error_is_seen_if_a_call_raises_it(self, tmp_path, head):
        done = run(
            tmp_path,
            """
            class Broken(Mine):
                def __init__(self):
                    raise RuntimeError("no arm")
            with Cluster(num_nodes=1) as cluster:
                group = Broken.create_group().launch(cluster)
                try:
                    group.add(1).wait()
                except RuntimeError:
                    print("seen")
                Mine.create_group().launch(cluster).add(1).wait()  # the report of the first would be due by now
            """,
            **head,
        )
        assert (done.returncode, done.stdout) == (0, "seen\n"), done.stderr
        assert "nobody awaits it" not in done.stderr


class TestOrderlyEnd:
    """What the user's code registered with `atexit` runs when its worker is ended, and not killed."""

    def test_atexit_functions_run_on_the_main_thread(self, tmp_path, head):
        done = run(
            tmp_path,
            """
            import atexit, threading

            class Ends(Mine):
                def __init__(self):
                    atexit.register(self.bye)

                def bye(self):
                    print("atexit on", threading.current_thread().name, end="")

                def _close(self):
                    print("close")

            class EndsInALoop(Ends):
                async def coroutine(self): pass

            with Cluster(num_nodes=1) as cluster:
                for cls, method in ((Ends, "fork"), (Ends, "spawn"), (EndsInALoop, "fork")):
                    for end in ("group", "cluster"):
                        name = f"{end}-{method}-{cls.__name__}"
                        group = cls.create_group().launch(cluster, name=name, start_method=method)
                        group.say("here").wait()
                        if end == "group":
                            group.shutdown()
            """,
            **head,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, list[str]] = {}
        for worker, _, text in (line.partition("] ") for line in done.stdout.splitlines()):
            said.setdefault(worker, []).append(text)
        assert len(said) == 6
        for worker, texts in said.items():
            closes = ["close"] if worker.startswith("[group") else []
            assert texts == ["here", *closes, "atexit on MainThread"], worker

    def test_a_worker_that_is_stuck_in_c_ends_at_once_without_any(self, tmp_path, head):
        done = run(
            tmp_path,
            """
            import ctypes, signal, time
            class Stuck(Mine):
                def wait_in_c(self):
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as a call that is not interrupted
                    print("stuck", flush=True)
                    ctypes.CDLL(None).sleep(1000)
            with Cluster(num_nodes=1) as cluster:
                group = Stuck.create_group().launch(cluster, name="g")
                stuck = group.wait_in_c()
                group.shutdown(grace=600.0)
            """,
            **head,
        )
        assert done.returncode == 0, done.stderr


class TestNothingRemains:
    """The leak check finds everything that a test's processes started, wherever it hides."""

    SOURCE = """
        import subprocess, threading
        from live_workers import Where, many
        cluster = Cluster(num_nodes=1)
        group = many(cluster, Where, 2)
        pids = [pid for _, pid in group.where().wait()]
        child = group.execute_on(0).leave_child().wait()
        blocked = group.block()
        print(*pids, *child, cluster._daemon._process.pid, cluster._daemon.run_dir, flush=True)
        sys.stdin.readline()  # until the test watches all of these
        {end}
    """
    WAIT = "import signal; r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w); os.read(r, 1)"
    """For a signal. A lock would not be woken by one that comes between Python's look for signals and the wait."""

    def start(self, tmp_path, end):
        path = lw.script(tmp_path, HEADER + lw.dedent(self.SOURCE.format(end=end)))
        env = {**lw.SCRIPT_ENV, **{name: os.environ[name] for name in ("RLINF_ACTORS_TEST", "RLINF_ACTORS_RUN_DIR")}}
        env["PYTHONPATH"] += os.pathsep + str(lw.ROOT / "tests/live")
        driver = subprocess.Popen(
            [sys.executable, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        *pids, run_dir = driver.stdout.readline().split()
        pidfds = [os.pidfd_open(int(pid)) for pid in pids]
        assert Path(run_dir).exists()
        driver.stdin.close()
        return driver, pidfds, run_dir

    def gone(self, driver, pidfds):
        with driver:
            driver.wait(pace.PATIENCE_S)
        for pidfd in pidfds:
            lw.wait_for_end(pidfd)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_killed_driver_leaves_nothing(self, tmp_path, rlinf_leak_check, number):
        driver, pidfds, _ = self.start(tmp_path, self.WAIT)
        driver.send_signal(number)
        self.gone(driver, pidfds)

    @pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)", "1 / 0"])
    def test_driver_that_ends_leaves_nothing(self, tmp_path, rlinf_leak_check, end):
        driver, pidfds, _ = self.start(tmp_path, end)
        self.gone(driver, pidfds)

    def test_driver_that_ends_leaves_nothing_beside_another_on_its_head(self, tmp_path, local_cluster):
        local = local_cluster(1)
        path = lw.script(
            tmp_path,
            HEADER
            + lw.dedent(f"""
            import threading
            from live_workers import Where, many
            cluster = Cluster(num_nodes=1, head={local.head!r})
            group = many(cluster, Where, 2)
            print(*[pid for _, pid in group.where().wait()], *group.execute_on(1).leave_child().wait(), flush=True)
            threading.Event().wait()
            """),
        )
        path_of_workers = lw.SCRIPT_ENV["PYTHONPATH"] + os.pathsep + str(lw.ROOT / "tests/live")
        env = {**lw.SCRIPT_ENV, **local.driver_env, "PYTHONPATH": path_of_workers}
        mine = lw.many(local.cluster(), lw.Greeter, 1)
        mine.wait_ready()
        driver = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True, env=env)
        pidfds = [os.pidfd_open(int(pid)) for pid in driver.stdout.readline().split()]
        driver.kill()
        self.gone(driver, pidfds)
        assert mine.greet().wait() == ["hello you from 0"]


def test_notebook_cells_work_on_one_running_loop(tmp_path, head):
    """Cells on one running loop, as ipykernel runs them: top-level await, and code that blocks."""
    done = run(
        tmp_path,
        """
        import asyncio
        loop = asyncio.new_event_loop()
        cell = lambda code: loop.run_until_complete(code())

        async def one():
            global cluster
            cluster = Cluster(num_nodes=1)

        async def two():
            global group
            group = Mine.create_group().launch(cluster)

        async def three():
            print(await group.add(1), group.add(2).wait())

        async def four():
            async for rank, value in group.add(3).as_completed():
                print(rank, value)

        async def five():
            await group.shutdown()
            cluster.shutdown()

        for code in (one, two, three, four, five):
            cell(code)
        loop.close()
        """,
        **head,
    )
    assert (done.returncode, done.stdout) == (0, "[1] [2]\n0 3\n"), done.stderr
