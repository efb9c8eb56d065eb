"""Backports for Python 3.10: TaskGroup, timeout, tomllib. No other module checks the version."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup, timeout

    import tomllib
else:
    import tomli as tomllib
    from taskgroup import TaskGroup, timeout

__all__ = ["TaskGroup", "timeout", "tomllib"]
