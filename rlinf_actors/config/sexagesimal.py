"""The mark on numbers that YAML read in base 60. Apart from the YAML loader, which workers never need."""

from __future__ import annotations


class SexagesimalInt(int):
    """A number that was written ``a:b`` without quotes: YAML 1.1 reads those in base 60.

    It stays usable as the number, since in another part of the file it may be meant; whoever expects
    ranks refuses it.

    Attributes:
        written: how the file has it.
        line: line in the file, from 1.
    """

    written: str
    line: int
