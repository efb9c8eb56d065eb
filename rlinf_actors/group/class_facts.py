"""ClassFacts: what the handle of a group must know about its worker class, and checks of worker classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable
from typing import Any

import msgspec

from rlinf_actors.errors import UsageError
from rlinf_actors.model import marks

RESERVED = ("launch", "execute_on", "from_group_name", "worker_info_list", "worker_group_name", "worker_cls_name")
"""Attributes of a group that RLinf scripts use. A worker's method must not have one of these names."""

YIELDING = (
    "shutdown", "wait_ready", "world_size", "placements", "with_timeout", "with_retries", "control", "from_address",
    "method", "call", "add_ranks", "remove_ranks", "on_node",
)  # fmt: skip
"""Newer attributes of a group.

A worker's method of the same name hides the group's, which is then ``group.control.<name>``.

If a worker has a method ``control``, ``WorkerGroup.shutdown(group)`` still calls the group's own method.
"""

LEASE_HOOK = "on_lease_lost"
"""The runtime calls this method of a robot worker itself; see Worker.on_lease_lost."""

OUTSIDE_HOOK = "stop_hardware"
"""The runtime calls this method in a process beside the robot worker; see Worker.stop_hardware."""

RESTART_HOOK = "on_restart"
"""The runtime calls this method of a restarted worker itself; see Worker.on_restart."""

RESIZE_HOOK = "on_world_size_changed"
"""The runtime calls this method when the group has another number of ranks; see Worker.on_world_size_changed."""

_NOT_CALLED = ("create_group", "timer", "worker_timer", LEASE_HOOK, OUTSIDE_HOOK, RESTART_HOOK, RESIZE_HOOK)

_WRAPPERS = (staticmethod, classmethod, functools.partialmethod)


class Method(msgspec.Struct, frozen=True):
    """What a caller must know about a public method of a worker class.

    Attributes:
        streams: True if the method is a generator; its result is then a stream of items.
        idempotent: True if the method may run more than once for one call (Worker.idempotent).
        concurrent: number of threads that run this method beside the main thread (Worker.concurrent); 0: the method
            runs on the main thread.
    """

    streams: bool = False
    idempotent: bool = False
    concurrent: int = 0


class ClassFacts(msgspec.Struct, frozen=True):
    """What the handle of a group must know about the worker class, which the process of the handle may not have.

    Attributes:
        name: name of the class.
        methods: public methods by name, including inherited ones.
        own: names of the public methods that the user's classes define, without those of Worker.
        private: names of the private methods, including inherited ones.
        cls: the class, or None if this process has only a handle.
    """

    name: str
    methods: dict[str, Method]
    own: frozenset[str]
    private: frozenset[str]
    cls: type | None = None


def facts_of(cls: type) -> ClassFacts:
    methods = public_methods(cls)
    of_users = {
        name
        for klass in cls.__mro__
        if klass is not object and not klass.__module__.startswith("rlinf_actors.")
        for name in vars(klass)
    }
    private = [name for name in dir(cls) if name.startswith("_") and not name.startswith("__")]
    return ClassFacts(
        cls.__name__,
        methods,
        frozenset(of_users & methods.keys()),
        frozenset(name for name in private if callable(getattr(cls, name))),
        cls,
    )


def public_methods(cls: type) -> dict[str, Method]:
    """Return the public methods of a worker class by name, including inherited ones."""
    methods = {}
    for name in dir(cls):
        if name.startswith("_") or name in _NOT_CALLED:
            continue
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        function = function.func if isinstance(function, functools.partialmethod) else function
        if callable(function) and not isinstance(function, type) and function not in marks.DECORATORS:
            # a plain decorator may make a list of a generator: only a function that yields itself streams
            streams = inspect.isasyncgenfunction(inspect.unwrap(function)) or inspect.isgeneratorfunction(function)
            methods[name] = Method(streams, marks.is_idempotent(function), marks.threads_of(function))
    return methods


def names_of_functions(cls: type) -> dict[Any, str]:
    """Return a mapping from function to name for all methods of *cls* and its bases.

    By it a group finds the name of a method that a caller gives as an object. The keys are what `function_of` returns.
    """
    found: dict[Any, str] = {}
    for klass in cls.__mro__:
        for name, member in vars(klass).items():
            function = function_of(member)
            if not isinstance(function, Hashable) or not (callable(member) or isinstance(member, _WRAPPERS)):
                continue
            if function not in found or name == getattr(function, "__name__", None):  # else it is an alias
                found[function] = name
    return found


def function_of(member: Any) -> Any:
    """Return the plain function of a method, to compare methods: equal however the method was obtained.

    *member* is an attribute of the class or of a subclass, or a value of ``vars(cls)``.
    """
    member = getattr(member, "__func__", member)
    for attribute in ("__partialmethod__", "_partialmethod"):  # of Python 3.13 and later, and of earlier ones
        member = getattr(member, attribute, member)
    return member


def check_class(cls: type, base: type) -> None:
    """Raise UsageError if a worker class has a method that no group can call.

    That is a method with a name that groups reserve, or with ``@Worker.concurrent()`` if it is private or async.

    Args:
        cls: the worker class.
        base: Worker, whose own methods and those of its bases may have reserved names.
    """
    for klass in cls.__mro__:
        if klass is base:
            break
        for name in RESERVED:
            if name in vars(klass):
                raise UsageError(
                    f"{klass.__name__}.{name} clashes with WorkerGroup.{name}, which every group needs: "
                    f"rename the method"
                )
    methods = public_methods(cls)
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if not marks.threads_of(function):
            continue
        if name not in methods:
            raise UsageError(
                f"{cls.__name__}.{name} is marked @Worker.concurrent(), and is not called from outside: remove the mark"
            )
        plain = inspect.unwrap(function)
        if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
            raise UsageError(
                f"{cls.__name__}.{name} is an async def marked @Worker.concurrent(): it runs on the worker's event "
                "loop, beside the other coroutines. Remove the mark; or make it a plain def, which gets a thread of "
                "its own and answers also while the event loop is blocked"
            )


def check_robot_hooks(cls: type) -> None:
    """Raise UsageError if on_lease_lost or stop_hardware of a worker class cannot run when the robots must stop."""
    for name, arguments in ((LEASE_HOOK, 0), (OUTSIDE_HOOK, 1)):
        member = inspect.getattr_static(cls, name, None)
        if member is None:
            continue  # no subclass of Worker
        hook, bound = getattr(cls, name), isinstance(member, (staticmethod, classmethod))
        plain = inspect.unwrap(hook)
        if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
            raise UsageError(
                f"{cls.__name__}.{name} is an async def: it runs when nothing else of the worker does, its event "
                "loop included. Make it a plain def that talks to the robot directly"
            )
        if name == OUTSIDE_HOOK and not bound:
            raise UsageError(
                f"{cls.__name__}.{name} needs an instance, and there is none where it runs: in a process beside the "
                f"worker. Make it a @staticmethod or @classmethod: def {name}(hardware_infos)"
            )
        try:
            inspect.signature(hook).bind(*[None] * (arguments + (not bound)))
        except TypeError as error:
            wanted = "no arguments" if not arguments else "one argument, the list of HardwareInfos"
            raise UsageError(f"{cls.__name__}.{name} cannot be called with {wanted}: {error}") from None


def defines(cls: type, name: str) -> bool:
    """Return True if a class of the user, and not only Worker, defines the method *name*."""
    definer = next((klass for klass in cls.__mro__ if name in vars(klass)), None)
    return definer is not None and not definer.__module__.startswith("rlinf_actors.worker.")
