"""Values inside control messages about log files of workers, and the names of these files. Pure.

The house rules of values.py hold. The contents of log files are the users': they are shown, and never interpreted.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import Annotated, Union

from msgspec import Meta

from rlinf_actors.wire.bounds import Name, Text
from rlinf_actors.wire.protocol import Number
from rlinf_actors.wire.values import Value

MAX_LOG_SLICE = 1 << 18
"""Most bytes of a log file in one message."""
MAX_LOG_FILES = 2048
"""Most log files in one message."""
MAX_LOG_WAIT_S = 20.0
"""Longest time that a node waits for new output before it answers with none, in seconds."""
DAEMON_LOG = "agentd.log"
"""Name of the log file of agentd itself, where it has one. It belongs to no job."""

MAX_LOG_JOBS = 32
"""Most jobs of one log file in one message."""
MAX_LOG_MARKS = 512
"""Most marks of the part of a log file in one message."""

MARKS = ".marks"
"""Suffix of the file beside a log file that says when its parts were written, and in which job."""
MARK = struct.Struct("<dQ8s8x")
"""An entry of it: a time in seconds since the epoch, the size of the log file before the output of that time, and the
id of the job (`job_id`). No entry is in two blocks of a disk, so a full disk leaves no part of one.
"""
MAX_TIME = 1 << 37
"""Latest time of a mark: calendars know the years up to 9999."""
MARKED_S = 1.0
"""Shortest time between two marks of one job, in seconds."""

Size = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A number of bytes or files, or an inode."""
Offset = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
"""A position in a file, in bytes; a negative one counts from the end."""


class LogQuestion(Value, frozen=True, tag="ReadLogs"):
    """Request to a node: send the names of the log files of a job's workers, or a part of one.

    Attributes:
        namespace: the job; None for all jobs of the node.
        name: a name of LogSlice.files; "" to ask for the files.
        offset: position of the first byte to send.
        inode: the file that the offset belongs to, 0 for the one that has the name. If that file was renamed since,
            the answer is its rest, and then the next file.
        since: with an offset of 0 and this time (seconds since the epoch), begin at the first byte written after it.
        wait_s: seconds to wait for output if there is none after the offset.
    """

    namespace: Union[Name, None] = None
    name: Name = ""
    offset: Offset = 0
    inode: Size = 0
    since: Number = 0.0
    wait_s: Number = 0.0


class LogMark(Value, frozen=True):
    """What is known of the bytes of a log file from `offset` on, up to the next mark.

    Attributes:
        at: the time before which none of them was written, in seconds since the epoch by the node's clock.
        job: id of the job whose worker wrote them, "" if unknown.
    """

    offset: Size
    at: Annotated[float, Meta(ge=0, le=MAX_TIME)]
    job: Name = ""


class LogFile(Value, frozen=True):
    """A log file of a node. `namespace` is the name of its job as a directory (`file_name`); "" for DAEMON_LOG.

    `modified` is the time of its last change in seconds since the epoch, `running` True if its worker runs. `inode`
    tells files of one machine apart, since several agentds may name one. `jobs` has the first mark of each job whose
    output is in the file, of the last MAX_LOG_JOBS ones.
    """

    namespace: Name
    name: Name
    size: Size
    modified: Number
    running: bool = False
    inode: Size = 0
    jobs: Annotated[
        list[LogMark],
        Meta(max_length=MAX_LOG_JOBS, title="jobs", description="A job of the same name appends to the file."),
    ] = []


class LogSlice(Value, frozen=True, tag=True):
    """Answer of a node to a LogQuestion.

    Attributes:
        files: the files, if the question named none.
        more: number of files that found no room.
        data: bytes of the file from the offset on.
        offset, inode: for the next question: the position after `data`, and the file that it belongs to.
        ended: True if the worker has ended and `data` is the end of its output.
        marks: what is known of `data`; the first one may be about bytes before it.
        lost: True if bytes between the question's offset and `data` are gone: the file was renamed twice, or cut.
        fault: why there is no answer, for people.
    """

    files: Annotated[
        list[LogFile],
        Meta(max_length=MAX_LOG_FILES, title="files", description="Two for each worker, and older parts."),
    ] = []
    more: Size = 0
    data: Annotated[
        bytes, Meta(max_length=MAX_LOG_SLICE, title="output", description="A log file is read in slices.")
    ] = b""
    offset: Size = 0
    inode: Size = 0
    ended: bool = False
    lost: bool = False
    fault: Text = ""
    marks: Annotated[
        list[LogMark], Meta(max_length=MAX_LOG_MARKS, title="marks", description="A slice with more is cut.")
    ] = []


def job_id(token: str) -> str:
    """Return the id of the job with this token. It tells jobs of one name apart, and says nothing about the token."""
    return hashlib.sha256(b"job id of " + token.encode()).hexdigest()[:8] if token else ""


def file_name(name: str) -> str:
    """Return *name* if it consists of at most 120 ASCII letters, digits and ``._-`` and does not begin with a dot.
    Otherwise return a similar name of that form, with a hash added so that different names stay different.
    """
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:120].lstrip(".") or "_"
    return clean if clean == name else f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
