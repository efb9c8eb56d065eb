"""What all tests share: which of them can run here, and which must."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from types import ModuleType

import hypothesis
import pace
import pytest
from nightly import Figures, Tally
from virtual_time import VirtualLoop

from rlinf_actors.testing import pytest_plugin

LONG_SUITES = frozenset({"benchmarks", "chaos", "fuzz", "soak", "typing"})
"""Directories whose tests are not quick, though most of them run in one process."""
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """This user's keys, heads and kept logs are none of the tests' business, and an emergency stop in another terminal
    stops none of the tests'. Also: where the project runs from its checkout, nothing has registered the plugin yet.
    """
    gc.disable()  # until all test modules are imported: it takes a third of the time that rewriting assertions does
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else torch's threads spin beside processes that have work
    config_home = tempfile.TemporaryDirectory(prefix="rlinf-test-config-")
    config.add_cleanup(config_home.cleanup)
    os.environ["XDG_CONFIG_HOME"] = config_home.name  # before test modules keep the environment for what they start
    os.environ["XDG_STATE_HOME"] = config_home.name
    os.environ["RLINF_ACTORS_CACHE_DIR"] = f"{config_home.name}/cache"
    os.environ["RLINF_ACTORS_HEADS"] = f"{config_home.name}/heads"
    os.environ["RLINF_ACTORS_CLIENT_CONFIG"] = f"{config_home.name}/client.toml"
    os.mkdir(os.environ["RLINF_ACTORS_HEADS"])
    open(os.environ["RLINF_ACTORS_CLIENT_CONFIG"], "x").close()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and what it starts, ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and under nohup this one
    os.umask(0o022)  # with one that lets others write (0002 is usual too) files of keys and state are refused
    if not config.pluginmanager.is_registered(pytest_plugin):
        config.pluginmanager.register(pytest_plugin)
    if path := config.getoption("figures"):
        config.pluginmanager.register(Tally(Figures("", path)))
    pace.slowness = config.getoption("slowness")
    pace.rounds = config.getoption("rounds")
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)
    config.add_cleanup(lambda: os.close(config.stash[STDERR]))
    # by default an example fails that takes 0.2 s, on a machine that stands still for a moment too
    hypothesis.settings.register_profile(
        "any machine",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        max_examples=35 * pace.rounds,
    )
    hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End a run whose threads have not ended: the interpreter would wait for them for ever, and say nothing."""
    ends_by_itself = {threading.main_thread(), *concurrent.futures.thread._threads_queues}
    waiting = [one for one in threading.enumerate() if not one.daemon and one not in ends_by_itself]
    for thread in waiting:
        thread.join(pace.PATIENCE_S)
    if left := [thread.name for thread in waiting if thread.is_alive()]:
        print(f"these threads of tests have not ended: {left}", file=sys.stderr)
        faulthandler.dump_traceback()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(pytest.ExitCode.TESTS_FAILED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-torch", action="store_true", help="leave out the tests marked torch, also where CI is set"
    )
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly too (tests/nightly.py)")
    parser.addoption("--look-up", action="store_true", help="ask the package index (tests/packaging/test_aarch64.py)")
    parser.addoption("--rounds", type=int, default=1, help="times as many random examples (tests/pace.py)")
    parser.addoption("--engine", default="", help="podman, docker or any (tests/packaging/test_image.py)")
    parser.addoption("--figures", metavar="FILE", help="append what tests measure to that file (tests/nightly.py)")
    parser.addoption("--slowness", type=float, default=1.0, help="how much slower timers of tests are (tests/pace.py)")
    parser.addoption("--soak-gib", type=float, default=1, help="GiB through shared memory (tests/soak)")
    parser.addoption("--soak-seconds", type=float, default=4, help="how long the soak lasts (tests/soak)")
    parser.addoption("--strangers", type=int, default=50, help="how many come to each socket (test_strangers*.py)")
    parser.addoption("--hostile-seconds", type=float, default=3, help="of a flood (test_hostile_members.py)")
    parser.addoption("--idle-connections", type=int, default=200, help="that say nothing, to each process (the same)")
    parser.addoption("--gil-seconds", type=int, help="how long the GIL is held (tests/live/test_no_false_death.py)")
    parser.addoption(
        "--calls", type=int, default=4_000, help="of one driver to two workers (tests/cycles/test_many_calls.py)"
    )
    parser.addoption("--cycles", type=int, default=6, help="how many starts and stops tests/cycles makes")
    parser.addoption("--robot-rounds", type=int, default=1, help="how often each robot is stopped (tests/robots)")
    parser.addoption("--interruptions", type=int, default=500, help="of each kind (live/test_interrupted.py)")
    parser.addoption("--grandchildren", type=int, default=8, help="daemons that hide (tests/agentd/test_leftovers.py)")
    parser.addoption("--channel-items", type=int, default=4_000, help="through one channel (test_channel_bounds.py)")
    parser.addoption("--kill-rounds", type=int, default=1, help="how often each is killed (tests/kills)")
    parser.addoption("--head-restarts", type=int, default=2, help="by SIGTERM under load (test_head_restarts.py)")
    parser.addoption("--kill-seed", type=int, default=0, help="of when, and of who of two is killed first")
    parser.addoption(
        "--default-timers", action="store_true", help="cuts and stand stills with the default leases: 30 s each"
    )
    parser.addoption(
        "--watchdog-seconds", type=int, default=0, help="also let agentd stand still under systemd's watchdog; below 9"
    )
    parser.addoption("--systemd", default="", help="directory with another systemd (tests/agentd/systemd_box.py)")
    parser.addoption("--soak-seed", type=int, help="of the soak: the plan of an earlier run; by default a new one")
    parser.addoption("--year-minutes", type=float, default=0, help="how long the year goes on (tests/year)")
    parser.addoption("--year-faults", default="", help="of the year, separated by commas (tests/year/year_faults.py)")
    parser.addoption("--chaos-seconds", type=float, default=6, help="how long the chaos lasts (tests/chaos)")
    parser.addoption("--chaos-kinds", default="", help="of faults, separated by commas (tests/chaos/chaos_plan.py)")
    parser.addoption("--chaos-seed", type=int, help="of the chaos: the faults of an earlier run; by default new ones")


def is_quick(node: pytest.Item | pytest.Module) -> bool:
    slow = any(node.get_closest_marker(name) for name in ("live", "netns", "gpu", "slow"))
    return not slow and LONG_SUITES.isdisjoint(node.path.parts)


@pytest.hookimpl(tryfirst=True)  # `-m quick` sees the mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is quick. Skip the tests that need torch where it is missing; where CI is set, only if asked to. Skip
    the tests of the nightly leg outside it.
    """
    for item in items:
        nightly = item.get_closest_marker("nightly")
        if nightly and not config.option.nightly:
            item.add_marker(pytest.mark.skip(reason=f"in the nightly leg: {nightly.args[0]}"))
        if is_quick(item):
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("live") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(pace.LIVE_TIMEOUT_S))
    marked = [item for item in items if item.get_closest_marker("torch")]
    if not marked or (importlib.util.find_spec("torch") and not config.option.without_torch):
        return
    if os.environ.get("CI") and not config.option.without_torch:
        raise pytest.UsageError(
            f"{len(marked)} tests need torch, which is not installed, and CI is set: install it "
            "(pip install -c constraints.txt torch), or pass --without-torch"
        )
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="torch is not installed"))


def pytest_collection_finish() -> None:
    """All modules are imported: they are here to stay, and what collects garbage looks no more at them. With torch it
    takes a second otherwise, in each test that does.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let templates import torch and numpy only for tests that need them: it takes longer than the rest of most tests.

    Also end the run, with the stacks of all threads, if a test outlives its timeout and its cleanup. pytest-timeout
    raises in the main thread at the timeout, once: it does not end a thread that is in C, nor fixtures that hang too.
    """
    with pytest.MonkeyPatch.context() as patch, ending_the_run(item):
        if item.get_closest_marker("live") and not item.get_closest_marker("torch"):
            numpy = ("numpy",) if uses_numpy(item.getparent(pytest.Module).obj) else ()
            patch.setattr("rlinf_actors.cluster.service.PRELOADED", numpy)
        return (yield)


def uses_numpy(module: ModuleType) -> bool:
    """True if *module*, or a module from which it has imported a name, has imported numpy: then so do its workers."""
    numpy = sys.modules.get("numpy")
    names = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values()}
    modules = [module, *(sys.modules[name] for name in names if isinstance(name, str) and name in sys.modules)]
    return numpy is not None and any(value is numpy for one in modules for value in vars(one).values())


@contextlib.contextmanager
def ending_the_run(item: pytest.Item) -> Iterator[None]:
    """End the process if *item* is not over some time after its timeout."""
    marker = item.get_closest_marker("timeout")
    given = item.config.getoption("timeout")
    seconds = marker.args[0] if marker else float(item.config.getini("timeout") if given is None else given)
    if not seconds or item.config.getoption("usepdb"):
        yield
        return
    faulthandler.dump_traceback_later(seconds + pace.CLEANUP_S, exit=True, file=item.config.stash[STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of an async test."""
    return {"loop": VirtualLoop if item.get_closest_marker("virtual_time") else asyncio.new_event_loop}


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """For what a test measures and does not assert, and for how much of a long form is done (tests/nightly.py)."""
    return Figures(request.node.nodeid, request.config.getoption("figures"))


@pytest.fixture
def late_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeout errors wait until the late workers have said what they run, however busy the machine is."""
    from rlinf_actors.runtime.future import Promise
    from rlinf_actors.runtime.late_report import LateReport

    monkeypatch.setattr(LateReport, "wait", lambda report, _timeout=None: Promise.wait(report, pace.PATIENCE_S))


@pytest.fixture(autouse=True, scope="module")
def garbage_counts_for_its_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the last test of a file whose quick tests left something unclosed, or a coroutine that was never awaited.
    Else the garbage collector says so during any later test that makes many objects, and that test fails.
    """
    yield
    if is_quick(request.node):
        gc.collect()


@pytest.fixture(autouse=True)
def no_state_on_this_machine() -> Iterator[None]:
    """Fail a test whose head kept its state where heads of this user do (head.state_place). Only in CI: elsewhere a
    head of a person, or of another run, may make that directory during any test.
    """
    if not os.environ.get("CI"):
        yield
        return
    usual = "/var/lib/rlinf-actors" if os.geteuid() == 0 else os.path.expanduser("~/.local/state/rlinf-actors")
    before = os.path.exists(usual)
    yield
    if not before and os.path.exists(usual):
        pytest.fail(f"the test, or one that runs beside it, left {usual}: set XDG_STATE_HOME", pytrace=False)


@pytest.fixture(autouse=True)
def leaves_no_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a module of its temporary directory: a later test would import it instead of its own."""
    before, place = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    left = [name for name in sys.modules.keys() - before if place in str(getattr(sys.modules[name], "__file__", ""))]
    for name in left:
        del sys.modules[name]
    if left:
        pytest.fail(f"the test left {', '.join(left)} in sys.modules", pytrace=False)


@pytest.fixture(autouse=True)
def orphans_are_inits() -> Iterator[None]:
    """A test that runs an agent's code in this process makes it a subreaper; the next test's orphans are not ours."""
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
