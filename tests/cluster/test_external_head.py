"""A head outside loopback: what a driver is told it could do."""

from __future__ import annotations

import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.net.socket_security import Security
from rlinf_actors.settings import Settings


def test_the_advice_is_for_drivers_too_and_works():
    with pytest.raises(ConfigError, match="RLINF_ACTORS_INSECURE_TEST_NETWORK=1 for drivers"):
        Security().mechanism("tcp://10.0.0.1:6380", "connect to")
    followed = Settings.load({"RLINF_ACTORS_INSECURE_TEST_NETWORK": "1"})
    Security(insecure_test_network=followed.insecure_test_network).mechanism("tcp://10.0.0.1:6380", "connect to")
