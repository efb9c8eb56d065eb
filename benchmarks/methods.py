"""What every worker of a benchmark can do, whatever runs it. Light to import: worker processes do."""

from __future__ import annotations

import os


class Methods:
    def noop(self) -> None:
        return None

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: object) -> object:
        return value
