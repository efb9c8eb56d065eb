"""`rlinf-actors estop --arm`: what presses the button, what disarms it, and what it says of heads. Real processes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing

import pytest
from estop_kit import COMMAND, Armed
from namespaces import can_unshare

from rlinf_actors.net.host import HeldPorts

pytestmark = pytest.mark.live


class Stalls(threading.Thread):
    """The control: the longest stall of a thread that should run every few milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.worst_s = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            due = time.monotonic() + 0.002
            self._over.wait(0.002)
            self.worst_s = max(self.worst_s, time.monotonic() - due)

    def __enter__(self) -> Stalls:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def test_the_button_stops_every_head_within_20_ms(lab):
    machine, one, other = lab
    with Armed(machine, "--reason", "button") as armed:
        with Stalls() as stalls:
            began = time.monotonic()
            os.write(armed.process.stdin.fileno(), b"\n")
            said = armed.until("pressed")
        code, report, _ = armed.end()
    assert said["sent_at"] - began - stalls.worst_s < 0.02, stalls.worst_s
    assert (code, report["complete"]) == (0, True)
    assert sorted(cluster["head"] for cluster in report["clusters"]) == sorted([one, other])
    assert any("button" in line for line in machine.in_force(one))


@pytest.mark.parametrize(("on_loss", "code"), [("stop", 0), ("exit", 130)])
def test_end_of_the_pipe_counts_as_pressed_unless_on_loss_says_otherwise(lab, on_loss, code):
    machine, one, _ = lab
    with Armed(machine, "--reason", f"loss-{on_loss}", "--on-loss", on_loss) as armed:
        armed.process.stdin.close()
        assert armed.end()[0] == code
    assert any(f"loss-{on_loss}" in line for line in machine.in_force(one)) == (on_loss == "stop")


def test_sigterm_disarms_the_button(lab):
    with Armed(lab[0]) as armed:
        armed.process.terminate()
        code, report, err = armed.end()
    assert (code, report) == (130, {})
    assert "disarmed: no robot was stopped" in err


def test_sigterm_after_the_press_does_not_say_that_no_robot_was_stopped(machine):
    process, _ = machine.head()
    with Armed(machine, heads=1) as armed:
        process.send_signal(signal.SIGSTOP)
        os.write(armed.process.stdin.fileno(), b"\n")
        armed.until("pressed")
        armed.process.terminate()
        code, report, err = armed.end()
        process.send_signal(signal.SIGCONT)
    assert (code, report) == (130, {})
    assert err == "INTERRUPTED: THE STOP IS NOT CONFIRMED. ROBOTS MAY STILL MOVE: PRESS THEIR OWN EMERGENCY STOPS.\n"


@pytest.mark.parametrize(("key", "code"), [(b"\n", 0), (b"\x04", 130)])
def test_enter_on_a_terminal_stops_and_control_d_disarms(lab, key, code):
    ours, theirs = pty.openpty()
    try:
        with Armed(lab[0], stdin=theirs) as armed:
            os.write(ours, key)
            assert armed.end()[0] == code
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("end", ["level", "gone"])
def test_a_gpio_line_stops_by_its_level_and_by_its_loss(lab, tmp_path, end):
    line = tmp_path / "value"
    line.write_text("1\n")
    with Armed(lab[0], "--gpio-file", str(line), "--gpio-at", "0", stdin=subprocess.DEVNULL) as armed:
        if end == "level":
            line.write_text("0\n")
        else:
            line.unlink()
        code, report, _ = armed.end()
    assert (code, report["complete"]) == (0, True)


def test_gpio_line_at_its_level_stops_at_once(lab, tmp_path):
    (tmp_path / "value").write_text("1\n")
    done = lab[0].estop("--arm", "--gpio-file", str(tmp_path / "value"))
    assert done.returncode == 0, done
    assert done.stdout.count("STOPPED") == 2


@pytest.mark.skipif(not can_unshare("--mount", "true"), reason="needs root and mount namespaces")
def test_kernel_file_is_awaited_with_pollpri():
    code = """
        import select, subprocess
        from rlinf_actors.cli.estop_button import Line
        line = Line("/proc/self/mounts", "1")
        waiting = select.poll()
        waiting.register(line.fd, line.events)
        while waiting.poll(0):
            line.pressed()
        subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True)
        assert waiting.poll(60000)
        assert line.pressed() is False
    """
    subprocess.run(["unshare", "--mount", sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_button_without_input_is_refused(lab):
    done = subprocess.run(
        [*COMMAND, "estop", "--arm"], env=lab[0].env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 64
    assert "standard input is neither a terminal nor a pipe. Run it on a terminal, or give --gpio-file" in done.stderr


@pytest.mark.parametrize("named", [True, False])
def test_a_button_pressed_while_a_head_is_restarted_stops_its_robots(machine, tmp_path, named):
    with closing(HeldPorts()) as ports:
        listen = f"127.0.0.1:{ports.hold()}"
        command = (*COMMAND, "head", "--listen", listen, "--state-dir", str(tmp_path / "state"))
        process, _ = machine.start(*command)
        with Armed(machine, *(("--head", listen) if named else ()), heads=1) as armed:
            process.kill()
            armed.until("lost")
            os.write(armed.process.stdin.fileno(), b"\n")
            armed.until("pressed")
            machine.start(*command)
            code, report, err = armed.end()
        assert (code, report["complete"]) == (0, True), err
        assert [cluster["head"] for cluster in report["clusters"]] == [listen]
        assert machine.in_force(listen)


def test_button_reports_new_suspended_and_ended_heads(machine):
    _, one = machine.head()
    with Armed(machine, heads=1) as armed:
        process, other = machine.head()
        assert armed.until("armed", 2)["head"] == other
        process.send_signal(signal.SIGSTOP)
        lost = armed.until("lost", 1)
        assert lost["head"] == other
        assert "ENTER DOES NOT REACH IT NOW" in lost["text"]
        process.send_signal(signal.SIGCONT)
        assert armed.until("armed", 2)["text"] == "again"
        process.kill()
        assert armed.until("ended", 1)["head"] == other
        armed.process.stdin.close()
        code, report, _ = armed.end()
    assert (code, [cluster["head"] for cluster in report["clusters"]]) == (0, [one])
