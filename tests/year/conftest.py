from pathlib import Path

import pace
import pytest


def pytest_collection_modifyitems(config, items):
    """Give the year the time that it is to take."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            limit_s = 120 + 4 * pace.PATIENCE_S + 90 * config.option.year_minutes
            item.add_marker(pytest.mark.timeout(limit_s), append=False)  # before that of all live tests
