"""docs/reference/errors.md has an entry for every public error class, with its bases and attributes as they are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from rlinf_actors import errors

DOC = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
ENTRY = re.compile(r"^\* \*\*`(\w+)`\*\* \(([^)]*)\): ", re.MULTILINE)


def attributes(kind: type[Exception]) -> list[str]:
    """Those that its constructor takes by keyword; of a class without one, its base's."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]


def test_every_error_has_an_entry_with_its_true_bases_and_attributes():
    public = {  # an old name that is kept for a class has no entry of its own
        kind.__name__: ([base.__name__ for base in kind.__bases__], attributes(kind))
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, Exception)
    }
    said = {
        name: tuple(re.findall(r"`(\w+)`", part) for part in ([*rest.split(";"), ""])[:2])
        for name, rest in ENTRY.findall(DOC.read_text())
    }
    assert said == {name: (bases, given) for name, (bases, given) in public.items()}


def test_no_error_has_two_entries():
    names = [name for name, _ in ENTRY.findall(DOC.read_text())]
    assert len(names) == len(set(names))
