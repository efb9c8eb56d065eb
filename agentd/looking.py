"""Looking for the hardware that the configuration gives this node: a process asks the type, which is a user's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from agentd.launch import Rules, find_interpreter, process_environment
from rlinf_actors.hardware.contained import ChildEnd, fault_of, run_child
from rlinf_actors.wire.values import HardwareAnswer, HardwareQuestion

MAX_LIMIT_S = 600.0
"""No look takes longer, whatever its asker says."""
_CHILD = "rlinf_actors.hardware.enumeration_child"


class Looker:
    """Starts such processes. Call it from the main thread: they end with the thread that started them.

    Args:
        rules: which interpreters may be started here.
        root: directory of rlinf_actors, and of nothing else: another interpreter has packages of its own.
        environment: the node's, asked for at every look.
        described: whether this node only pretends to have hardware.
    """

    def __init__(
        self, rules: Rules, root: str, environment: Callable[[], Mapping[str, str]], *, described: bool
    ) -> None:
        self._rules = rules
        self._root = root
        self._environment = environment
        self._mode = "described" if described else "real"

    async def look(self, question: HardwareQuestion) -> HardwareAnswer:
        """Ask the type. Cancelling kills the process. Whatever the process does, it is in the answer."""
        try:
            env = process_environment(self._environment(), question.env, question.path_env_merge_mode)
            python = find_interpreter(question.interpreter, env, self._rules)
        except ValueError as error:
            return HardwareAnswer(kind="failed", text=str(error))
        limit_s = min(question.limit_s, MAX_LIMIT_S)
        given = msgspec.json.encode(question)
        end = await run_child(
            _CHILD, [self._mode], python=python, env=env, timeout_s=limit_s, root=self._root, given=given
        )
        return read_answer(end, f"enumerate() of {question.type}", limit_s)


def read_answer(end: ChildEnd, whose: str, limit_s: float) -> HardwareAnswer:
    """What a process that ended like this said. Pure."""
    fault = fault_of(end, whose, limit_s)
    if fault:
        return HardwareAnswer(kind="failed", text=f"{fault}; it was killed" if end.hung else fault)
    try:
        return msgspec.json.decode(end.output, type=HardwareAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return HardwareAnswer(kind="failed", text=f"{whose} left no readable answer ({error}): {end.output[:80]!r}")
