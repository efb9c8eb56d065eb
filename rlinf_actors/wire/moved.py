"""Names that one version of Python or numpy pickles and another one has elsewhere. Unpickles nothing itself.

Any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rlinf_actors.errors import SerializationError

_PATHLIB = "pathlib._local"
"""What Python 3.13 calls pathlib in its pickles; no other version has such a module."""
_BIT_GENERATOR = ("numpy.random._pickle", "__bit_generator_ctor")


def may_be_moved(data: bytes) -> bool:
    """True if the pickle *data* may have names that this process's versions have elsewhere."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        elsewhere = b"numpy" in data
    elif _major(numpy) >= 2:
        elsewhere = b"numpy.core" in data
    else:
        elsewhere = b"numpy._core" in data or b"numpy.rec" in data or b"numpy.random" in data
    return elsewhere or (sys.version_info[:2] != (3, 13) and _PATHLIB.encode() in data)


def found_at(module: str, name: str) -> tuple[str, str]:
    """Return the module and name where this process has what a pickle calls *module* and *name*."""
    if module == _PATHLIB and sys.version_info[:2] != (3, 13):
        return "pathlib", name
    if not module.startswith("numpy."):
        return module, name
    import numpy

    if _major(numpy) >= 2:
        return _below(module, "numpy.core", "numpy._core"), name
    if module == "numpy.rec":
        return "numpy.core.records", name
    return _below(module, "numpy._core", "numpy.core"), name


def adapted(module: str, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    """Return *found*, which has this name here, as it takes what other versions pickle beside it."""
    if (module, name) != _BIT_GENERATOR:
        return found

    def make(kind: Any = "MT19937") -> Any:
        import numpy

        if isinstance(kind, type) and _major(numpy) < 2:
            raise SerializationError(
                f"a random generator of numpy 2 ({kind.__name__}) cannot be read by numpy {numpy.__version__}: "
                "send its seed, or use the same major version of numpy on both ends"
            )
        return found(kind)

    return make


def _below(module: str, there: str, here: str) -> str:
    return here + module[len(there) :] if module == there or module.startswith(there + ".") else module


def _major(numpy: Any) -> int:
    return int(numpy.__version__.partition(".")[0])
