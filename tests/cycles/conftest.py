from pathlib import Path

import pace
import pytest


def pytest_collection_modifyitems(config, items):
    """Remove the timeout, which fits the short form only."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(20 + pace.PATIENCE_S + 3 * config.option.cycles))
