"""Entry point of `rlinf-actors`. Imports nothing that the extra [cli] brings before it knows that it is there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

MISSING = 69
"""Exit code (EX_UNAVAILABLE) without click and rich."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        arguments: without the program's name; default: this process's.
    """
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"rlinf-actors needs {' and '.join(missing)}: pip install 'rlinf-actors[cli]'",
            file=sys.stderr,
        )
        return MISSING
    from rlinf_actors.cli.app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))


if __name__ == "__main__":
    sys.exit(main())
