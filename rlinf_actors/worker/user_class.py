"""The user's class in a worker, and in its stopper: extensions, import, and the arguments of the constructor."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rlinf_actors.errors import ConfigError, ProtocolMismatchError, WorkerStartError
from rlinf_actors.settings import EXT_MODULE
from rlinf_actors.wire import frames, payload
from rlinf_actors.worker.worker import Worker


def load_class(
    frame: frames.Create, parts: payload.AuthenticatedParts, where: str
) -> tuple[type[Worker], tuple[Any, ...], dict[str, Any], Any]:
    """Import the class that *frame* and its payload *parts* describe.

    Returns:
        The class, the arguments of its constructor, and what else its owner sent.

    Raises:
        WorkerStartError: the class or its arguments cannot be imported here; the text says what to do. *where* names
            this interpreter and node in it.
    """
    extension = os.environ.get(EXT_MODULE)
    if extension or frame.extensions:
        from rlinf_actors.hardware import extensions

        try:
            if extension:
                extensions.load_module(extension)
            extensions.load_driver_extensions(frame.extensions, where)
        except ConfigError as error:
            raise WorkerStartError(str(error)) from error
    cls = _import_class(frame.cls, where) if frame.cls else None
    try:
        given, args, kwargs, extras = payload.decode(parts)
    except ProtocolMismatchError as error:
        raise WorkerStartError(str(error)) from None
    except (ImportError, AttributeError) as error:
        raise WorkerStartError(
            f"the worker class or its arguments need something that {where} does not have: {error}. "
            f"Install it there, or name an interpreter that has it (env_configs: python_interpreter_path)"
        ) from error
    cls = cls or given
    if not (isinstance(cls, type) and issubclass(cls, Worker)):
        raise WorkerStartError(f"{cls!r} is not a subclass of rlinf_actors.Worker")
    return cls, args, kwargs, extras


def _import_class(reference: str, where: str) -> Any:
    module, _, qualname = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except ImportError as error:
        raise WorkerStartError(
            f"{reference} cannot be imported by {where}: {error}. Its sys.path is {sys.path}. Put the module on "
            f"PYTHONPATH there (env_configs: env_vars), install it, or define the class in the launching script, "
            f"which sends it along"
        ) from error
    except AttributeError as error:
        raise WorkerStartError(
            f"{reference} cannot be imported by {where}: {error}. Another version of {module} is installed there: "
            f"{getattr(sys.modules.get(module), '__file__', 'unknown file')}"
        ) from error
    return found
