"""What a head with keys finds beside its key file."""

from __future__ import annotations

from rlinf_actors.head.key_registry import NO_OWN_KEYS, OwnKeys
from rlinf_actors.security import keyfile
from rlinf_actors.security import keyfile as thisuser
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.settings import Settings


def own_keys(head: KeyFile | None, settings: Settings) -> OwnKeys:
    """The head's own keys: its pair's, and that of the driver on its machine, which `keys init` makes beside it.

    Args:
        head: its own key file, or its user's; None for a head without keys.
        settings: the environment's.

    Raises:
        ConfigError: the driver's key file cannot be used.
    """
    if head is None:
        return NO_OWN_KEYS
    if head.role == thisuser.ROLE:
        return OwnKeys(local=head.pair.public)
    path = keyfile.locate(settings, "driver")
    if path is not None:
        driver = keyfile.load(path)
        if driver.head == head.pair.public:  # else this user drives another cluster
            return OwnKeys(head.pair.public, driver.pair.public, driver.name)
    return OwnKeys(head.pair.public)
