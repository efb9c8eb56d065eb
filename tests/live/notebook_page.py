"""Cells of a notebook, run as IPython runs them, and a page that shows them with their tables as Jupyter does."""

from __future__ import annotations

import ast
import html
import inspect
from collections.abc import Sequence
from typing import Any

_STYLE = """
body { margin: 0; padding: 14px 18px; background: #fff; color: #1f2328; font: 14px/1.45 system-ui, sans-serif; }
.cell { display: grid; grid-template-columns: 64px 1fr; gap: 0 8px; margin-bottom: 12px; }
.prompt { font: 13px/1.5 "DejaVu Sans Mono", monospace; color: #2257bd; text-align: right; padding-top: 7px; }
.out { color: #b3261e; }
pre { margin: 0; padding: 7px 10px; background: #f6f7f9; border: 1px solid #dfe3e8; border-radius: 3px;
  font: 13px/1.5 "DejaVu Sans Mono", monospace; }
.shown { padding: 7px 0 0 10px; }
table { border-collapse: collapse; font-size: 13px; margin-top: 4px; }
th, td { padding: 4px 10px; text-align: right; border: 0; }
thead { border-bottom: 1px solid #98a3b0; }
tbody tr:nth-child(odd) { background: #f6f7f9; }
"""


async def shown_by(code: str, names: dict[str, Any]) -> str:
    """Run a cell with *names*, and return the HTML of its last line's value."""
    *before, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    for tree, mode in ((ast.Module(before, []), "exec"), (ast.Expression(last.value), "eval")):
        value = eval(compile(tree, "<cell>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.iscoroutine(value):
            value = await value
    return str(value._repr_html_())


def page_of(cells: Sequence[tuple[str, str]]) -> str:
    """Return the page of cells, each with its code and the HTML that it shows."""
    body = "".join(
        f'<div class="cell"><div class="prompt">In [{at}]:</div><pre>{html.escape(code)}</pre>'
        f'<div class="prompt out">Out[{at}]:</div><div class="shown">{table}</div></div>'
        for at, (code, table) in enumerate(cells, 1)
    )
    return f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style><main>{body}</main>"
