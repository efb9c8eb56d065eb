"""What `rlinf-actors run` tells the processes that it starts, in one line of JSON on their stdin. Pure.

Keys of a run travel in these lines only: they are in no command line, environment variable or file of a node. The pipe
stays open as long as the run lives, so its end tells the processes that the run has ended, however it has ended.
"""

from __future__ import annotations

import msgspec


class NodeOrder(msgspec.Struct, frozen=True):
    """What one agentd shall be.

    Attributes:
        rank: rank of the node.
        key: text of the agentd's key file.
        run_dir: run directory of the agentd, "" to make one on the node.
        log_dir: directory for the output of the node's workers, "" for one in the run directory.
    """

    rank: int
    key: str
    run_dir: str = ""
    log_dir: str = ""


class AgentOrder(msgspec.Struct, frozen=True):
    """The order of one agentd; or of several, each of which takes the node with its name.

    Attributes:
        connect: HOST:PORT of the head.
        nodes: the nodes, by name.
    """

    connect: str
    nodes: dict[str, NodeOrder]


class HeadOrder(msgspec.Struct, frozen=True):
    """What the head of a run needs to know.

    Attributes:
        nodes: names of the nodes that may join, by public key.
        run: id of the run, which marks the processes of its program.
        run_dir: directory of the run, in which the head listens on a unix socket. If the run is killed, the head ends
            the program and removes this directory.
        program: command line of the program, for people.
    """

    nodes: dict[str, str]
    run: str
    run_dir: str
    program: str = ""
