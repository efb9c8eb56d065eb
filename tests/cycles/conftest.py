from pathlib import Path

import pace
import pytest


def pytest_collection_modifyitems(config, items):
    """The usual timeout is for the short form. A last look may wait."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(20 + pace.PATIENCE_S + 3 * config.option.cycles))
