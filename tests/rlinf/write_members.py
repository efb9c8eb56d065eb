"""Writes rlinf_actors/dropin/class_members.py from the checkout of RLinf that RLINF_SRC names.

RLINF_SRC=~/RLinf python -m tests.rlinf.write_members
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import rlinf_actors
from tests.rlinf import checkout

FILE = Path(rlinf_actors.__file__).parent / "dropin" / "class_members.py"
BEGIN, END = "MEMBERS: Mapping[str, Mapping[str, Absent]] = {\n", '}\n"""For each class'


def main() -> None:
    """Replace the table in the file."""
    text = FILE.read_text()
    before, _, rest = text.partition(BEGIN)
    lines = []
    for cls in checkout.CLASSES:
        names = textwrap.wrap(" ".join(sorted(checkout.lacking(cls))), 100)
        lines += [
            f'    "{cls}": _internal(',
            '        """',
            *(f"        {line}" for line in names),
            '        """',
            "    ),",
        ]
    FILE.write_text(before + BEGIN + "\n".join(lines) + "\n" + rest[rest.index(END) :])


if __name__ == "__main__":
    main()
