"""`rlinf-actors estop --arm`: a button that is connected to every head before the user presses it.

Safety code; the rules of cli.estop apply. One thread waits in one poll(2) for all inputs: the terminal, a pipe or a
GPIO line; the messages of heads; and inotify events of the record files that heads write and remove. Its only timer
sends each head a beat every second. Every head answers a beat, so silence shows that a head is suspended or out of
reach.

When pressed, the button first sends the stop on its open connections, and only then looks for further heads.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from rlinf_actors.cli.estop_targets import (
    DEADLINE_S,
    MAY_MOVE,
    KnownHeads,
    Report,
    StopTarget,
    answers_to,
    known_heads,
    print_json,
    question_of,
    say,
    settings_here,
)
from rlinf_actors.errors import UsageError
from rlinf_actors.exit_codes import INTERRUPTED, USAGE
from rlinf_actors.net import head_records
from rlinf_actors.net.blocking_client import BlockingClient, HeadDown, HeadUp
from rlinf_actors.wire.agent_messages import Beat
from rlinf_actors.wire.protocol import printable

BEAT_S = 1.0
LOST_S = 3.0
"""Seconds without an answer (three beats) after which a head counts as lost."""
UNITS = "/run"
"""Parent of the run directories that systemd makes for units."""
_MCL_CURRENT_AND_FUTURE = 3
_IN_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_OF_NAMES = 0x40 | 0x80 | 0x100 | 0x200  # IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE
_OF_A_FILE = 0x2 | 0x4 | 0x8 | 0x400 | 0x800  # IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE, IN_DELETE_SELF, IN_MOVE_SELF
_EVENT = struct.Struct("=iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class _Disarmed(Exception):
    """Raised to end the button without stopping a robot: on Ctrl-D, SIGTERM or SIGHUP, or if the input is lost and the
    option --on-loss is "exit".
    """


def run(options: argparse.Namespace) -> int:
    """Wait until the button is pressed, then stop all robots. Return the exit code. Raise ConfigError if the value of
    --head is no address.
    """
    try:
        trigger = Line(options.gpio_file, options.gpio_at) if options.gpio_file else None
        keys = _standard_input(trigger is not None)
    except (UsageError, OSError) as error:
        say(f"rlinf-actors estop --arm: {error}")
        return USAGE
    _stay_in_memory()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _disarm)
    button = Button(options, keys, trigger)
    try:
        return button.run()
    except (_Disarmed, KeyboardInterrupt):
        disarmed = "disarmed: no robot was stopped, and this button stops none any more"
        say(f"INTERRUPTED: THE STOP IS NOT CONFIRMED. {MAY_MOVE}" if button.pressed else disarmed)
        return INTERRUPTED
    finally:
        button.close()


def _disarm(number: int, frame: FrameType | None) -> None:
    raise _Disarmed


def _stay_in_memory() -> None:
    """Turn garbage collection off, and lock this process's memory if that is permitted. A collection or paging could
    delay the stop.
    """
    gc.freeze()
    gc.disable()
    if os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        _libc.mlockall(_MCL_CURRENT_AND_FUTURE)


def _standard_input(has_line: bool) -> int:
    """Return 0, the descriptor of stdin, if input on stdin presses the button. Return -1 if only the file of
    --gpio-file presses it. *has_line* is True if the user gave --gpio-file.

    Raise UsageError if nothing can press the button: the user gave no file, and stdin is neither a terminal nor a pipe.
    """
    with contextlib.suppress(OSError):
        mode = os.fstat(0).st_mode
        if os.isatty(0):
            return 0
        if not has_line and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return 0
    if has_line:
        return -1
    raise UsageError(
        "no input can press the button: standard input is neither a terminal nor a pipe. Run it on a terminal, or give "
        "--gpio-file"
    )


class Line:
    """The file of --gpio-file, which presses the button when its level changes: a GPIO line of sysfs, a FIFO, or any
    file that contains 0 or 1.

    poll(2) reports `events` on the descriptor `fd` when the level may have changed. *path* is the path of the file, and
    *at* the level that presses the button, "0" or "1".

    Raises:
        UsageError: the file does not report its changes.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str, at: str) -> None:
        self._path = path
        self._at = at.encode()
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._watches: Watches | None = None
        self.fd, self.events = self._file, select.POLLIN
        self._fifo = stat.S_ISFIFO(os.fstat(self._file).st_mode)
        if os.path.realpath(path).startswith(("/sys/", "/proc/")):
            self.events = select.POLLPRI | select.POLLERR
            edge = os.path.join(os.path.dirname(os.path.realpath(path)), "edge")
            with contextlib.suppress(FileNotFoundError), open(edge) as file:
                if file.read().strip() == "none":
                    raise UsageError(f"{path} does not report its changes: echo both > {edge}")
        elif not self._fifo:
            self._watches = Watches()
            self._watches.add(path, _OF_A_FILE)
            self.fd = self._watches.fd

    def pressed(self) -> bool | None:
        """Return True if the file of --gpio-file has the level that presses the button, False if not, and None if the
        file is gone or cannot be read.
        """
        try:
            if self._watches is not None:
                for _ in self._watches.read():
                    pass
                if os.stat(self._path).st_ino != os.fstat(self._file).st_ino:
                    return None
            if self._fifo:
                data = os.read(self._file, 4096)
                return self._at in data if data else None
            return os.pread(self._file, 16, 0).strip() == self._at
        except BlockingIOError:
            return False
        except OSError:
            return None

    def close(self) -> None:
        os.close(self._file)
        if self._watches is not None:
            self._watches.close()


class Watches:
    """Watches files and directories by inotify(7), so that the button notices new heads and changed files. The
    descriptor `fd` is readable when there are events.
    """

    def __init__(self) -> None:
        self.fd = int(_libc.inotify_init1(_IN_NONBLOCK_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def add(self, path: str, mask: int) -> None:
        """Watch the file or directory *path* for the inotify events in *mask*. If the path is already
        watched, *mask* replaces its former mask. Raise OSError if the path cannot be watched.
        """
        if _libc.inotify_add_watch(self.fd, os.fsencode(path), mask) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)

    def read(self) -> Iterator[str]:
        """Yield a name for each pending inotify event: the name of the file in the watched directory, or "" if the
        event is of the watched path itself. Does not block.
        """
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            _, _, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size + length
            yield os.fsdecode(data[at - length : at].rstrip(b"\0"))

    def close(self) -> None:
        os.close(self.fd)


class Button:
    """The emergency-stop button: its connections to the heads, and the inputs that press it.

    *options* are those of the command line. *keys* is the descriptor whose input presses the button, or -1 for none.
    *line* is the file whose level presses the button, or None.
    """

    def __init__(self, options: argparse.Namespace, keys: int, line: Line | None) -> None:
        self._options = options
        self._keys = keys
        self._line = line
        self._asker = BlockingClient()
        self._watches = Watches()
        self._known = KnownHeads()
        self._targets: dict[tuple[str, ...], StopTarget] = {}
        self._question = question_of(options)
        self.pressed = False

    def run(self) -> int:
        """Wait until the button is pressed, stop all robots and return the exit code.

        Raise _Disarmed if the user pressed Ctrl-D, or if the input was lost and the option --on-loss is "exit".
        """
        if self._line is not None and self._line.pressed():
            self._print("pressed already", "", f"{self._options.gpio_file} is {self._options.gpio_at} now")
            return self._press()
        self._asker.watch(self._watches.fd, select.POLLIN)
        if self._keys >= 0:
            self._asker.watch(self._keys, select.POLLIN)
        if self._line is not None:
            self._asker.watch(self._line.fd, self._line.events)
        self._find_heads(first=True)
        beat_at = time.monotonic()
        while True:
            events, ready = self._asker.step(beat_at - time.monotonic())
            if self._is_pressed(ready):
                return self._press()
            again = False
            for event in events:
                target = next((one for one in self._targets.values() if one.asked is event.head), None)
                if target is not None and isinstance(event, HeadUp):
                    self._set(target, "armed")
                elif target is not None and isinstance(event, HeadDown):
                    self._set(target, "lost", event.why)
                    again = True  # the head may have ended
            if self._watches.fd in ready:
                names = list(self._watches.read())
                again = again or any(name.startswith("rlinf-") for name in names)
            if again:
                self._find_heads()
            if (now := time.monotonic()) >= beat_at:
                beat_at = now + BEAT_S
                self._send_beats(now)

    def close(self) -> None:
        self._asker.close()
        self._watches.close()
        if self._line is not None:
            self._line.close()

    # --- inputs that press the button ---

    def _is_pressed(self, ready: dict[int, int]) -> bool:
        if self._line is not None and self._line.fd in ready:
            level = self._line.pressed()
            if level is None:
                return self._input_lost(f"{self._options.gpio_file} is gone")
            if level:
                return True
        if self._keys in ready:
            data = os.read(self._keys, 4096)
            if data:
                return True
            if os.isatty(self._keys):
                raise _Disarmed  # Ctrl-D
            return self._input_lost("the pipe's other end is closed")
        return False

    def _input_lost(self, what: str) -> bool:
        if self._options.on_loss == "exit":
            say(f"{what}: nobody can press this button any more")
            raise _Disarmed
        self._print("line lost", "", f"{what}: that counts as pressed (--on-loss stop)")
        return True

    def _press(self) -> int:
        """Send the stop to all connected heads. Then search again, and send the stop to heads that are found only now.
        Return the exit code.
        """
        self.pressed = True
        for target in self._targets.values():
            self._asker.ask(target.asked, self._question)
        self._print("pressed", "", f"heads that are asked: {len(self._targets)}", sent_at=time.monotonic())
        before = set(self._targets)
        self._find_heads(pressed=True)
        for key in self._targets.keys() - before:
            self._asker.ask(self._targets[key].asked, self._question)
        report = Report(self._options.as_json)
        then = None if self._options.no_wait else question_of(self._options, wait=True)
        for target, answer in answers_to(self._asker, list(self._targets.values()), then):
            report.add(target, answer)
        return report.end(self._known)

    # --- the heads ---

    def _find_heads(self, first: bool = False, pressed: bool = False) -> None:
        for path in (UNITS, *head_records.watched(settings_here(KnownHeads()))):
            with contextlib.suppress(OSError):  # the directory was just removed
                self._watches.add(path, _OF_NAMES)  # before the search, so that no head that starts meanwhile is missed
        known = known_heads(self._options.head)
        troubles, self._known = self._known.troubles, known
        for trouble in known.troubles:
            if trouble not in troubles:
                self._print("trouble", "", trouble)
        found = {target.key: target for target in known.targets}
        now = time.monotonic()
        for key in self._targets.keys() - found.keys():
            target = self._targets[key]
            if not pressed and now - target.found_at >= DEADLINE_S:  # before, it may be restarting
                del self._targets[key]
                self._asker.drop(target.asked)
                self._print("ended", target.address, "its head has ended", target)
        for key in found.keys() - self._targets.keys():
            self._targets[key] = found[key]
            self._asker.add(found[key].asked)
        for key in found:
            self._targets[key].found_at = now
        for key in found.keys() & self._targets.keys():
            target, ways = self._targets[key], found[key].asked.ways
            if not target.asked.up and len(ways) > len(target.asked.ways):  # a key for this head has appeared
                self._asker.drop(target.asked)
                target.asked.ways = ways
                self._asker.add(target.asked)
        if first and not found:
            self._print("empty", "", "NO HEAD IS KNOWN YET: ENTER WOULD STOP NOTHING. One that is started is armed")

    def _send_beats(self, now: float) -> None:
        for target in self._targets.values():
            if not target.asked.up:
                if target.state == "new" and now - target.asked.added > LOST_S:
                    self._set(target, "lost", "it does not answer")
                continue
            if now - target.asked.heard > LOST_S:
                self._set(target, "lost", f"it has not answered for {now - target.asked.heard:.0f} s")
            elif target.state == "lost":
                self._set(target, "armed")
            self._asker.tell(target.asked, Beat())

    def _set(self, target: StopTarget, state: str, why: str = "") -> None:
        before, target.state = target.state, state
        if before == state:
            return
        if state == "lost":
            self._print("lost", target.address, f"{why}. ENTER DOES NOT REACH IT NOW", target)
        else:
            self._print("armed", target.address, "again" if before == "lost" else "connected", target)

    def _print(self, event: str, address: str, text: str, target: StopTarget | None = None, **more: Any) -> None:
        armed = sum(target.state == "armed" for target in self._targets.values())
        if self._options.as_json:
            print_json({"event": event, "head": address, "text": text, "armed": armed, **more})
            return
        bell = "\a" if event in ("lost", "trouble", "empty") and sys.stdout.isatty() else ""
        who = f" ({target.description})" if target is not None else ""
        where = f"{address}: " if address else ""
        print(bell + printable(f"{event.upper().ljust(11)}  {where}{text}{who}", 4096), flush=True)
