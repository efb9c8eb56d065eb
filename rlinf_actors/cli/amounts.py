"""Numbers on a command line."""

from __future__ import annotations

import math
from typing import Any

import click


class Amount(click.FloatRange):
    """A number in a range. NaN is in none: no comparison holds for it, and the head would drop what has it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.FloatRange."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number
