"""docs/reference/errors.md, made from docstrings, has every error and exit code, with its cause and what to do."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
import reference_pages

from rlinf_actors import errors, exit_codes

PUBLIC = {  # a former name that is kept for a class has no entry of its own
    kind.__name__: kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)
}
BASES = {"RlinfActorsError", "EndedError"}
"""Those that stand for their subclasses."""


def test_every_error_is_in_one_section():
    assert sorted(name for names in reference_pages.ERRORS.values() for name in names) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_an_error_says_its_cause_what_to_do_and_what_its_attributes_are(name):
    said = inspect.cleandoc(PUBLIC[name].__doc__ or "")
    assert name in BASES or re.search(r"\n\nCause: .*\n\nFix: ", said, re.DOTALL)
    parameters = inspect.signature(PUBLIC[name].__init__).parameters.values()
    given = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    inherited = PUBLIC[name].__init__ is PUBLIC[name].__base__.__init__
    assert inherited or given == re.findall(r"^    (\w+): ", said.partition("\n\nAttributes:\n")[2], re.MULTILINE)


def test_every_exit_code_is_explained():
    assigned = [one for one in ast.parse(inspect.getsource(exit_codes)).body if isinstance(one, ast.Assign)]
    explained = re.findall(r"^### Exit code (\d+)$", reference_pages.errors(), re.MULTILINE)
    assert [str(ast.literal_eval(one.value)) for one in assigned] == explained
