"""What all control messages have in common: their base, and the version of the protocol.

House rules. A head serves peers of `OLDEST` to `PROTOCOL`, and a worker takes links from them, so that a cluster can be
upgraded node by node, the head first. So a message or frame only ever gains fields with a default; the default stands
for what the older version does. A new message goes only to a peer whose session speaks the protocol that has it, or to
one that may drop it while nobody waits for an answer.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 7
"""The newest protocol that this version speaks: raised with each release that adds to the control messages
(`wire.control_codec`), to values.py or to frames.py.
"""
OLDEST = 6
"""The oldest protocol that this version speaks: the one before."""
CHILD_MEMBERS = 7
"""The first protocol in which children of workers are members."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all control messages; the tag is the class's name."""


def agreed(oldest: int, newest: int) -> int:
    """Return the protocol that this process speaks with a peer, 0 if they have none in common.

    Args:
        oldest: the oldest protocol that the peer speaks.
        newest: the newest one; 0 from a peer that speaks *oldest* only.
    """
    common = min(max(oldest, newest), PROTOCOL)
    return common if common >= max(oldest, OLDEST) else 0


def spoken(oldest: int, newest: int) -> str:
    """Return the protocols of a peer, for people; arguments as of `agreed`."""
    return f"protocol {oldest}" if newest <= oldest else f"protocols {oldest} to {newest}"


def what_to_upgrade(oldest: int, peer: str, this: str) -> str:
    """Return what to do about a peer with which `agreed` is 0.

    Args:
        oldest: the oldest protocol that the peer speaks.
        peer: the peer, for people: "this driver".
        this: this process, for people: "the head".
    """
    return f"upgrade {this}" if oldest > PROTOCOL else f"upgrade {peer}"
