"""Numbers of things in texts for people. Pure."""

from __future__ import annotations


def counted(number: int, noun: str, more: str = "") -> str:
    """Return a number and what it counts: "1 node", "2 processes", "1,024 workers".

    Args:
        number: how many there are.
        noun: what is counted, in the singular.
        more: what follows, for one thing and for several, apart by "|": "is|are" makes "1 node is", "2 nodes are".
    """
    one, _, several = more.partition("|")
    plural = noun if number == 1 else f"{noun}{'es' if noun.endswith('s') else 's'}"
    follows = one if number == 1 else several
    return f"{number:,} {plural}{follows and f' {follows}'}"
