"""A test that hangs fails, and the run goes on; a run that cannot go on ends and shows its stacks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, tests: str, *, timeout: float = 1.0, cleanup: float = 60.0) -> tuple[int, str]:
    """Run *tests* with this project's settings; return the exit code and the output."""
    module = folder / "test_generated.py"
    module.write_text(f"import pace, pytest\npace.CLEANUP_S = {cleanup}\n" + textwrap.dedent(tests))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest",
         "-c", str(ROOT / "pyproject.toml"), "--timeout", f"{timeout}", str(module)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))},
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_each_hang_of_one_process_fails_its_own_test(tmp_path):
    code, output = run(
        tmp_path,
        """
        import asyncio, concurrent.futures, queue, select, socket, threading, time

        def test_sleep():
            time.sleep(100)

        def test_lock():
            threading.Semaphore(0).acquire()

        def test_join():
            over = threading.Event()
            thread = threading.Thread(target=over.wait)
            thread.start()
            try:
                thread.join()
            finally:
                over.set()
                thread.join()

        def test_result():
            concurrent.futures.Future().result()

        def test_queue():
            queue.Queue().get()

        def test_select():
            select.select([], [], [])

        def test_loop():
            while True:
                pass

        async def test_future():
            await asyncio.get_running_loop().create_future()

        async def test_blocked_loop():
            time.sleep(100)

        async def test_task_group():
            task = asyncio.ensure_future(asyncio.sleep(100))
            await asyncio.gather(task, asyncio.sleep(100))

        @pytest.fixture
        def hanging():
            time.sleep(100)

        def test_fixture(hanging):
            pass

        @pytest.fixture
        def hanging_cleanup():
            yield
            time.sleep(100)

        def test_cleanup(hanging_cleanup):
            pass

        def test_next():
            pass
        """,
    )
    assert code == 1, output
    assert "10 failed, 2 passed, 2 errors" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in_c", "cleanup_hangs_too"])
def test_a_run_that_cannot_go_on_ends_with_its_stacks(tmp_path, how):
    code, output = run(
        tmp_path,
        """
        import ctypes, time

        def test_in_c():
            ctypes.CDLL(None).pthread_sigmask(0, (ctypes.c_ubyte * 128)(*[255] * 128), None)
            time.sleep(100)

        @pytest.fixture
        def cleanup():
            yield
            time.sleep(100)

        def test_cleanup_hangs_too(cleanup):
            time.sleep(100)
        """.replace(f"def test_{how}", "def test_it"),
        timeout=0.5,
        cleanup=1.0,
    )  # fmt: skip
    assert code == 1, output
    assert "Timeout (0:00:01.500000)!" in output, output
    assert "test_generated.py" in output, output


@pytest.mark.live
def test_a_live_test_that_hangs_cleans_up_and_fails_alone(tmp_path):
    code, output = run(
        tmp_path,
        """
        import threading
        from rlinf_actors import NodePlacementStrategy, Worker

        class Hanging(Worker):
            def hang(self):
                threading.Event().wait()

        pytestmark = pytest.mark.live

        @pytest.mark.timeout(8)
        def test_hang(rlinf_cluster):
            group = Hanging.create_group().launch(rlinf_cluster, NodePlacementStrategy([0]), name="hanging")
            group.hang().wait()

        @pytest.mark.timeout(8)
        async def test_hang_in_a_loop(rlinf_cluster_async):
            group = await Hanging.create_group().launch(rlinf_cluster_async, NodePlacementStrategy([0]), name="hanging")
            await group.hang()

        @pytest.mark.timeout(60)
        def test_next(rlinf_cluster):
            assert rlinf_cluster.num_nodes == 1
        """,
    )
    assert code == 1, output
    assert "2 failed, 1 passed" in output, output
    assert "left behind" not in output, output
