"""Failures, and the errors that callers get."""

from __future__ import annotations

import os
import signal
import threading

import live_workers as lw
import pace
import pytest

from rlinf_actors import (
    PlacementError,
    SerializationError,
    WorkerDiedError,
    WorkerError,
)

pytestmark = pytest.mark.live


class TestExceptions:
    def check(self, error):
        assert isinstance(error, ValueError)
        assert isinstance(error, WorkerError)
        assert (error.rank, error.worker) == (1, "pair:1")
        assert error.node == os.uname().nodename
        assert 'raise ValueError("that was bad")' in error.remote_traceback
        assert "live_workers.py" in error.remote_traceback
        assert error.remote_traceback in str(error) + "\n"
        assert isinstance(error.__cause__, ValueError)

    def test_exception_is_caught_by_its_type_and_the_worker_goes_on(self, cluster):
        group = lw.many(cluster, lw.Greeter, 2, name="pair")
        for _ in range(2):
            try:
                group.bad(1).wait()
            except ValueError as error:
                self.check(error)
            else:
                pytest.fail("nothing was raised")
        assert group.greet().wait() == ["hello you from 0", "hello you from 1"]

    async def test_exception_is_raised_in_asyncio(self, cluster):
        group = await lw.many(cluster, lw.Greeter, 2, name="pair")
        try:
            await group.bad(1)
        except ValueError as error:
            self.check(error)
        assert await group.greet() == ["hello you from 0", "hello you from 1"]
        got = dict([pair async for pair in group.bad(1).as_completed(return_exceptions=True)])
        assert got[0] == "fine"
        self.check(got[1])

    def test_exception_of_a_users_class_is_raised(self, cluster):
        group = lw.Greeter.create_group().launch(cluster)
        with pytest.raises(lw.OddError, match="3 at here") as caught:
            group.custom().wait()
        assert caught.value.code == 3

    def test_wrong_arguments_are_a_type_error(self, cluster):
        group = lw.Greeter.create_group().launch(cluster)
        with pytest.raises(TypeError, match="unexpected keyword argument 'nam'"):
            group.greet(nam="x").wait()
        with pytest.raises(SerializationError) as caught:
            group.echo({"lock": threading.Lock()})
        assert caught.value.path == "args[0]['lock']"
        with pytest.raises(SerializationError, match=r"the result of echo\(\)"):
            group.echo(_MakesLock()).wait()
        with pytest.raises(PlacementError, match="rank 5 is not in group"):
            group.execute_on(5)
        with pytest.raises(ValueError, match="private"):
            group._set_up()
        assert group.greet().wait() == ["hello you from 0"]

    def test_error_of_a_constructor_is_raised(self, cluster):
        group = lw.many(cluster, lw.Greeter, 3, "hi", 1, name="half")
        call = group.greet()
        with pytest.raises(ValueError, match=r"half:1 on .* raised ValueError: no greeting on rank 1"):
            group.wait_ready()
        with pytest.raises(ValueError, match="no greeting"):
            call.wait()
        group.control.group.gone.wait(pace.PATIENCE_S)
        again = lw.many(cluster, lw.Greeter, 1, name="half")
        assert again.greet().wait() == ["hello you from 0"]

    def test_constructor_arguments_that_cannot_be_pickled_are_an_error(self, cluster):
        with pytest.raises(SerializationError) as caught:
            lw.Greeter.create_group(greeting={"x": threading.Lock()}).launch(cluster)
        assert caught.value.path == "greeting['x']"


class _MakesLock:
    """Arrives as a lock, which cannot be sent back."""

    def __reduce__(self):
        return threading.Lock, ()


class TestDeaths:
    def test_killed_worker_fails_its_call(self, cluster):
        group = lw.many(cluster, lw.Greeter, 2, name="mortal").wait_ready()
        group.execute_on(1).complain("all is not well").wait()
        pid = group.execute_on(1).about().wait()[0]["pid"]
        blocked = group.execute_on(1).block()
        both = group.block()
        os.kill(pid, signal.SIGKILL)
        for result in (blocked, both):
            with pytest.raises(WorkerDiedError) as caught:
                result.wait()
        error = caught.value
        assert (error.signal, error.exit_code, error.rank) == (signal.SIGKILL, None, 1)
        assert "mortal:1" in str(error)
        assert "SIGKILL" in str(error)
        assert error.stderr_tail[-1] == "all is not well"
        with pytest.raises(WorkerDiedError):
            group.execute_on(1).greet().wait()

    def test_other_ranks_go_on_after_a_death(self, cluster):
        group = lw.many(cluster, lw.Greeter, 2, name="mortal").wait_ready()
        with pytest.raises(WorkerDiedError):
            group.execute_on(0).kills_itself().wait()
        assert group.execute_on(1).greet().wait() == ["hello you from 1"]

    @pytest.mark.parametrize("code", [0, 3])
    def test_error_has_the_exit_code_of_the_worker(self, cluster, code):
        group = lw.Greeter.create_group().launch(cluster, name="exits")
        with pytest.raises(WorkerDiedError, match=f"exited with code {code}") as caught:
            group.exits(code).wait()
        assert (caught.value.exit_code, caught.value.signal) == (code, None)
        assert caught.value.stderr_tail[-1] == "last words"

    async def test_crash_of_a_worker_is_raised_in_asyncio(self, cluster):
        group = await lw.Greeter.create_group().launch(cluster, name="crashes")
        with pytest.raises(WorkerDiedError, match="SIGSEGV"):
            await group.kills_itself(signal.SIGSEGV)

    @pytest.mark.parametrize(("how", "said"), [("exit", "exited with code 7"), ("kill", "SIGKILL")])
    def test_death_in_the_constructor_fails_the_group(self, cluster, how, said):
        group = lw.ExitsInInit.create_group(how).launch(cluster, name="stillborn")
        with pytest.raises(WorkerDiedError, match=said) as caught:
            group.wait_ready()
        assert "dying in __init__" in caught.value.stderr_tail
        with pytest.raises(WorkerDiedError):
            group.anything().wait()

    def test_sys_exit_in_the_constructor_fails_the_group(self, cluster):
        group = lw.ExitsInInit.create_group("sys.exit").launch(cluster, name="stillborn")
        with pytest.raises(WorkerError, match="SystemExit: 8"):
            group.wait_ready()

    def test_a_stream_ends_with_its_worker(self, cluster):
        group = lw.Looped.create_group().launch(cluster, name="stream")
        pid = group.get_name().wait() and _pid_of(group)
        items = iter(group.numbers(10**9))
        assert next(items) == (0, 0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            list(items)


def _pid_of(group):
    return group.control.group.states[0].pid


def test_a_worker_whose_event_loop_is_stopped_says_so(cluster):
    group = lw.many(cluster, lw.Stopped, 1)
    with pytest.raises(WorkerDiedError, match=r"by loop\.stop\(\), while stop\(\) was under way"):
        group.stop().wait(pace.PATIENCE_S)
