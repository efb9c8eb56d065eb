"""Questions to nodes that the head forwards, and their answers: one pair of messages on each side of the head. Pure.

A client asks the head (AskNode), and the head asks the node's agentd (AskAgent). The answer comes back by AgentAnswered
and NodeAnswered. The values in them say what is asked and answered. The tag of a question is its verb: the table of
roles (security.members) has an entry for each, and the audit log names it. A question or answer is not interpreted
on its way, unless head.operations says so.
"""

from __future__ import annotations

from typing import TypeVar, Union

from rlinf_actors.wire.bounds import Name
from rlinf_actors.wire.check_values import CheckAnswer, CheckQuestion
from rlinf_actors.wire.debug_values import DebugAnswer, DebugQuestion
from rlinf_actors.wire.figure_values import FigureQuestion, NodeFigures
from rlinf_actors.wire.log_values import LogQuestion, LogSlice
from rlinf_actors.wire.protocol import ControlMessage, expected
from rlinf_actors.wire.stack_values import StackAnswer, StackQuestion
from rlinf_actors.wire.trace_values import SwitchedWorkers, TraceQuestion, TraceSlice, TraceSwitch

T = TypeVar("T")

NodeQuestion = Union[
    LogQuestion, StackQuestion, FigureQuestion, CheckQuestion, DebugQuestion, TraceSwitch, TraceQuestion,
]  # fmt: skip
NodeAnswer = Union[LogSlice, StackAnswer, NodeFigures, CheckAnswer, DebugAnswer, SwitchedWorkers, TraceSlice]


class AskNode(ControlMessage, frozen=True):
    """Ask the head to have the node `node_id` answer `question`.

    A TraceSwitch or TraceQuestion may also go to the job's driver with the incarnation `node_id`.

    Answered by NodeAnswered, or by Failed: kind node_lost if the node is lost, kind timeout if it does not answer.
    """

    node_id: Name
    question: NodeQuestion


class NodeAnswered(ControlMessage, frozen=True):
    answer: NodeAnswer


class AskAgent(ControlMessage, frozen=True):
    """Notice to an agentd or driver: answer `question` by AgentAnswered with the same id."""

    id: Name
    question: NodeQuestion


class AgentAnswered(ControlMessage, frozen=True):
    """Notice of an agentd or driver: the answer to the AskAgent with this id. The head ignores an unknown id."""

    id: Name
    answer: NodeAnswer


QuestionMessage = Union[AskNode, NodeAnswered, AskAgent, AgentAnswered]
"""Every control message of this file."""


def said(body: object) -> object:
    """Return what a message says under its verb: the question of an AskNode, else the message itself."""
    return body.question if isinstance(body, AskNode) else body


def verb(body: object) -> str:
    """Return the verb of a control message: the tag of what it says."""
    return str(said(body).__struct_config__.tag)  # type: ignore[attr-defined]


def answer_of(reply: object, kind: type[T]) -> T:
    """Return the answer in the head's reply to an AskNode. Raise ProtocolError if the answer is not a *kind*."""
    return expected(expected(reply, NodeAnswered).answer, kind)
