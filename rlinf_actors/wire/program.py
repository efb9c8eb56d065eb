"""The program of a driver: who runs what. Pure; the house rules of values.py hold."""

from __future__ import annotations

from datetime import datetime

from rlinf_actors.model.readable import duration
from rlinf_actors.shown import printable
from rlinf_actors.wire.bounds import Name, Path
from rlinf_actors.wire.protocol import Number
from rlinf_actors.wire.values import Value

MOST_CHARS = 200
"""Longest text about a program within a line."""


class Program(Value, frozen=True):
    """What a driver says about its process. The head passes it on to people, and decides nothing by it.

    Attributes:
        user: name of the user that it runs as; "" if the driver does not say who runs what.
        hostname: name of its machine.
        script: path of the script, or "-m MODULE", "-c" or "-" (standard input) as on the command line of Python. Its
            arguments may have secrets, and are not said.
        started: when the process started, in seconds since the epoch by its machine's clock.
    """

    user: Name = ""
    hostname: Name = ""
    script: Path = ""
    started: Number = 0.0

    def __str__(self) -> str:
        """Return "USER's SCRIPT", without the script's directory, for use within a line; "" if nothing is known."""
        if not self.user:
            return ""
        script = self.script if self.script.startswith("-") else self.script.rpartition("/")[2]
        return printable(f"{self.user}'s {'python ' if script.startswith('-') else ''}{script or 'python'}", MOST_CHARS)


def process_text(program: Program, pid: int, now: float) -> str:
    """Return which process a command line is, for people: "ann's `agentd` (pid 77 on gpu-1, started 3 h ago)".

    *now* is the present time in seconds since the epoch.
    """
    command = f"`{program.script}`" if program.script else "process"
    who = f"{program.user or 'a user'}'s {command}"
    return printable(placed(who, pid, program.hostname, program.started, now), 2 * MOST_CHARS)


def placed(who: str, pid: int, hostname: str, started: float, now: float | None) -> str:
    """Return *who* a process is with where it is and its age: "ann's train.py (pid 4242 on gpu-1, started 3 h ago)".

    *started* and *now* are in seconds since the epoch, 0 if they are not known. *hostname* is "" if it is not known. If
    *now* is None, the text is kept: then it has the date and time of the start.
    """
    where = f" on {hostname}" if hostname else ""
    age = f", started {duration(max(0.0, now - started))} ago" if started and now else ""
    if started and now is None:
        age = f", started {datetime.fromtimestamp(started).astimezone():%Y-%m-%d %H:%M}"
    return f"{who} (pid {pid}{where}{age})"


class DriverState(Value, frozen=True):
    """A connected driver, as the head sees it.

    Attributes:
        incarnation: id of this run of the driver.
        namespace: its job.
        pid: its process.
        node_rank: rank of the node on its machine; -1 on a machine without an agentd.
        program: who runs what.
        key: name of the driver's key, "" without keys.
    """

    incarnation: Name
    namespace: Name
    pid: int
    node_rank: int
    program: Program
    key: Name = ""

    def told(self, now: float) -> str:
        """Return which process this is, for people, as errors of the head name it. *now* is the head's present time."""
        program = self.program
        return placed(str(program) or "a driver", self.pid, printable(program.hostname), program.started, now)
