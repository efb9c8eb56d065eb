"""The texts of `rlinf-actors stack`: equal stacks once, cycles of waits, and who is missing in a collective. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from rlinf_actors.model.readable import duration, ranges
from rlinf_actors.plurals import counted
from rlinf_actors.runtime import wait_graph
from rlinf_actors.runtime.wait_graph import Step
from rlinf_actors.wire.stack_values import (
    IO_THREAD,
    NATIVE,
    PY_SPY,
    SIGNAL,
    STOPPED,
    Stack,
    StackFrame,
    Wait,
    WorkerStacks,
)

MAX_WAIT_LINES = 16
"""Most lines about the waits of workers with equal stacks."""
MAX_INDENTS = 10
"""Most steps by which a task in a long chain of tasks is indented."""
LEVEL_TEXTS = {
    IO_THREAD: "its I/O thread",
    SIGNAL: "a signal",
    PY_SPY: "py-spy",
    NATIVE: "py-spy, with C code",
}
_TORCH = "torch/"
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""torch's file of the collectives: all_reduce, barrier, init_process_group and so on, under their names."""
_EXECUTOR = "rlinf_actors/worker/executors.py"
_OURS = re.compile(
    r"/rlinf_actors/((channel|cluster|group|messaging|net|routing|runtime|template|tracing|wire|worker)/\w+|forks)\.py$"
)
_STDLIB = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen ")
_RUNTIME = (_EXECUTOR, "rlinf_actors/worker/invocation.py", "rlinf_actors/forks.py")


class ShownWorker(NamedTuple):
    job: str
    group: str
    rank: int
    node: str  # name
    answer: WorkerStacks
    place: str = ""  # the node's name for people, if that is another

    @property
    def name(self) -> str:
        return f"{self.group}:{self.rank}"


class Cycle(NamedTuple):
    """Workers of which each waits for the next, and the last for the first; see `wait_graph.cycles`."""

    job: str
    deadlock: bool
    steps: list[Step]


class Collective(NamedTuple):
    """A group of which some ranks are in a collective of torch, and others are not, or in another one.

    Attributes:
        inside: ranks by collective and the user's line that called it.
        outside: what each of the other ranks does.
    """

    job: str
    group: str
    inside: dict[tuple[str, str], list[int]]
    outside: dict[int, str]


def report_dict(workers: Sequence[ShownWorker]) -> dict[str, Any]:
    """Return the JSON object of the report. Its keys are stable; new keys may be added."""
    return {
        "cycles": [
            {
                "job": cycle.job,
                "deadlock": cycle.deadlock,
                "steps": [
                    {"worker": step.worker, "waits_for": step.waits_for, "what": step.wait.what,
                     "seconds": round(step.wait.seconds, 3)}
                    for step in cycle.steps
                ],
            }
            for cycle in cycles(workers)
        ],
        "collectives": [
            {
                "job": one.job,
                "group": one.group,
                "inside": [
                    {"collective": name, "place": place, "ranks": ranks} for (name, place), ranks in one.inside.items()
                ],
                "outside": [{"rank": rank, "does": text} for rank, text in one.outside.items()],
            }
            for one in collectives(workers)
        ],
        "workers": [
            {"job": one.job, "group": one.group, "rank": one.rank, "node": one.node, **_answer_dict(one.answer)}
            for one in workers
        ],
    }  # fmt: skip


def _answer_dict(answer: WorkerStacks) -> dict[str, Any]:
    every = {name: getattr(answer, name) for name in answer.__struct_fields__ if name not in ("waits", "stacks")}
    waits = [{name: getattr(wait, name) for name in wait.__struct_fields__} for wait in answer.waits]
    stacks = [
        {
            "name": stack.name,
            "kind": "task" if stack.is_task else "thread",
            "count": stack.count,
            "depth": stack.depth,
            "awaits": stack.awaits,
            "frames": [{"file": one.file, "line": one.line, "function": one.function} for one in stack.frames],
        }
        for stack in answer.stacks
    ]
    return {**every, "waits": waits, "stacks": stacks}


def report_lines(workers: Sequence[ShownWorker], all_frames: bool = False) -> Iterator[str]:
    """Yield the report's lines: cycles and uneven collectives first, then all workers, with equal stacks together.

    Frames of this library are counted, and shown if *all_frames*.
    """
    for cycle in cycles(workers):
        yield f"{'deadlock' if cycle.deadlock else 'cycle of waits'} in job {cycle.job}:"
        for step in cycle.steps:
            yield f"  {step.worker} waits in {step.wait.what} ({duration(step.wait.seconds)})"
        yield ""
    for uneven in collectives(workers):
        yield f"ranks of group {uneven.group} of job {uneven.job} are not in the same collective:"
        for (name, place), inside in uneven.inside.items():
            yield f"  {uneven.group}:{ranges(inside)} in {name}(){place and f' at {place}'}"
        for rank, text in itertools.islice(uneven.outside.items(), MAX_WAIT_LINES):
            yield f"  {uneven.group}:{rank} {text}"
        if len(uneven.outside) > MAX_WAIT_LINES:
            yield f"  and {counted(len(uneven.outside) - MAX_WAIT_LINES, 'other rank')}"
        yield ""
    for some in alike(workers):
        yield from _group_lines(some, all_frames)
        yield ""


# --- cycles ---


def cycles(workers: Sequence[ShownWorker]) -> list[Cycle]:
    """Return the cycles of waits of all jobs. Deadlocks come first."""
    waits: dict[str, dict[str, Sequence[Wait]]] = {}
    for one in workers:
        waits.setdefault(one.job, {})[one.name] = one.answer.waits
    found = [Cycle(job, *cycle) for job, of_job in waits.items() for cycle in wait_graph.cycles(of_job)]
    return sorted(found, key=lambda cycle: not cycle.deadlock)


# --- collectives ---


def collectives(workers: Iterable[ShownWorker]) -> list[Collective]:
    """Return the groups of which some ranks are in a collective of torch in which the others are not.

    It is seen in the stacks of the threads. A group of processes need not have all ranks of a group of workers: then
    the others are named, too.
    """
    groups: dict[tuple[str, str], list[ShownWorker]] = {}
    for one in workers:
        groups.setdefault((one.job, one.group), []).append(one)
    found = []
    for (job, group), some in groups.items():
        inside: dict[tuple[str, str], list[int]] = {}
        places: dict[tuple[str, str], tuple[str, str]] = {}  # of the first rank: directories differ between nodes
        outside: dict[int, str] = {}
        for one in some:
            call = next((call for stack in one.answer.stacks if (call := _collective(stack)) is not None), None)
            if call is not None:
                place = places.setdefault((call[0], _short(call[1])), call)
                inside.setdefault(place, []).append(one.rank)
            else:
                outside[one.rank] = _does(one.answer)
        if inside and (outside or len({name for name, _ in inside}) > 1):
            found.append(Collective(job, group, inside, outside))
    return found


def _collective(stack: Stack) -> tuple[str, str] | None:
    """Return the collective that a thread is in, and the user's line that called it; None if it is in none."""
    at = next((n for n, frame in enumerate(stack.frames) if frame.file.endswith(_COLLECTIVES)), None)
    if at is None:
        return None
    callers = [frame for frame in stack.frames[:at] if f"/{_TORCH}" not in frame.file]
    return stack.frames[at].function.rpartition(".")[2], _place(callers[-1]) if callers else ""


def _does(answer: WorkerStacks) -> str:
    """Return what a worker does, and where its main thread is in the user's code."""
    if answer.fault:
        return f"gives no answer: {answer.fault}"
    wait = next((wait for wait in answer.waits if wait.blocks), None)
    if wait is not None:
        return f"waits in {wait.what} for {duration(wait.seconds)}"
    if not answer.method and answer.level == IO_THREAD:
        return "runs no call"
    frames = [frame for stack in answer.stacks[:1] for frame in stack.frames]
    own = [frame for frame in frames[_begin(answer.stacks[0]) :] if f"/{_TORCH}" not in frame.file] if frames else []
    place = f" at {_place(own[-1])}" if own else ""
    return f"in {answer.method}() for {duration(answer.call_s)}{place}" if answer.method else f"is{place}"


def _place(frame: StackFrame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}"


# --- workers with equal stacks ---


def alike(workers: Iterable[ShownWorker]) -> list[list[ShownWorker]]:
    """Return the workers by job, group, call and stacks. Names of threads and tasks do not count, and of a file neither
    the directory, which may be another one on each node, nor the frames of this library.
    """
    found: dict[tuple[str, str, str, str, bytes], list[ShownWorker]] = {}
    for one in workers:
        shapes = msgspec.msgpack.encode([(s.is_task, s.count, s.depth, _shape(s)) for s in one.answer.stacks])
        key = (one.job, one.group, f"{one.answer.level} {one.answer.fault}", one.answer.method, shapes)
        found.setdefault(key, []).append(one)
    return list(found.values())


def _shape(stack: Stack) -> list[tuple[str, int, str]]:
    """Return what makes a stack equal to that of another worker."""
    shown = _folded(stack.frames[_begin(stack) :])
    return [(_short(one.file), one.line, one.function) for one in shown]


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def _folded(frames: Sequence[StackFrame]) -> Iterator[StackFrame]:
    """Yield *frames*, with one entry in place of several frames of this library and of what it calls of Python's."""
    ours: list[StackFrame] = []
    for one in frames:
        if _OURS.search(one.file) or (ours and _STDLIB.search(one.file)):
            ours.append(one)
            continue
        yield from _fold(ours)
        ours = []
        yield one
    yield from _fold(ours)


def _fold(ours: Sequence[StackFrame]) -> Sequence[StackFrame]:
    return ours if len(ours) < 2 else [StackFrame("", 0, f"… {len(ours)} frames of rlinf_actors")]


def _group_lines(some: Sequence[ShownWorker], all_frames: bool) -> Iterator[str]:
    first = some[0]
    nodes = dict.fromkeys(one.place or one.node for one in some)
    where = f"on {', '.join(nodes)}" if len(nodes) < 4 else f"on {len(nodes)} nodes"
    head = f"{first.group}:{ranges(one.rank for one in some)} of job {first.job}, {where}: "
    if first.answer.fault:
        yield f"{head}no answer: {first.answer.fault}"
        if first.answer.level == IO_THREAD and not first.answer.fault.startswith(STOPPED):
            yield "  --signal and --py-spy show stacks of workers that do not answer"
        return
    if first.answer.level != IO_THREAD:
        yield f"{head}stacks by {LEVEL_TEXTS.get(first.answer.level, first.answer.level)}"
        for stack in first.answer.stacks:
            yield from _stack_lines(stack, all_frames)
        return
    ages = list(dict.fromkeys(duration(age) for age in sorted(one.answer.call_s for one in some)))
    age = ages[0] if len(ages) == 1 else f"{ages[0]} to {ages[-1]}"
    doing = f"in {first.answer.method}() for {age}" if first.answer.method else "no call runs"
    yield f"{head}{doing} (stacks by {LEVEL_TEXTS[IO_THREAD]})"
    yield from _wait_lines(some)
    for number, stack in enumerate(first.answer.stacks):
        awaits = {one.answer.stacks[number].awaits for one in some}
        yield from _stack_lines(stack, all_frames, awaits.pop() if len(awaits) == 1 else "")
    if any(one.answer.cut for one in some):
        yield f"  left out of a worker: {counted(max(one.answer.cut for one in some), 'stack or wait')}"


def _wait_lines(some: Sequence[ShownWorker]) -> Iterator[str]:
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for one in some:
        for wait in one.answer.waits:
            found.setdefault((wait.what, "" if wait.blocks else wait.where), []).append((one.rank, wait.seconds))
    for number, ((what, place), waiting) in enumerate(found.items()):
        if number == MAX_WAIT_LINES:
            yield f"  and {counted(len(found) - number, 'other wait')}"
            return
        who = f"{some[0].group}:{ranges(rank for rank, _ in waiting)} " if len(some) > 1 else ""
        yield f"  {who}waits in {what} for {duration(max(age for _, age in waiting))}{place and f' ({place})'}"


def _stack_lines(stack: Stack, all_frames: bool, awaits: str = "") -> Iterator[str]:
    """Yield the lines of a thread or task. Tasks are indented beneath the one that awaits them."""
    kind = "task" if stack.is_task else "thread"
    indent = "    " * min(stack.depth, MAX_INDENTS)
    yield f"{indent}  {kind} {stack.name}{f' and {stack.count - 1} more' if stack.count > 1 else ''}:"
    for one in stack.frames if all_frames else _folded(stack.frames[_begin(stack) :]):
        yield f"{indent}    {one.file}:{one.line} in {one.function}" if one.file else f"{indent}    {one.function}"
    if awaits:
        yield f"{indent}    awaits {awaits}"


def _begin(stack: Stack) -> int:
    """Return the number of the first frame to show: those that lead to a method of the user tell nothing."""
    begin = next((n for n, one in enumerate(stack.frames) if one.file.endswith(_EXECUTOR)), 0)
    while begin < len(stack.frames) - 1 and stack.frames[begin].file.endswith(_RUNTIME):
        begin += 1
    return begin
