"""Who this user is, and the key of this user's own processes, for loopback where nobody has made keys.

Any user of a machine can connect to a loopback port, and take one that is free before somebody else's head does. So
both ends prove that they belong to one user: by a key file that makes itself when it is first needed, which only that
user can read. Whoever has it is `members.LOCAL`.
"""

from __future__ import annotations

import getpass
import os
import socket

from rlinf_actors.errors import ConfigError
from rlinf_actors.security import keyfile
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.settings import KEY_DIR, Settings

ROLE = "local"


def who() -> str:
    """Return ``USER@HOST`` of this process, for others to read. A container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the latter since Python 3.13
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def key(settings: Settings) -> KeyFile:
    """This user's; it is made if there is none. Any process, several at one moment too: all get the same.

    Raises:
        ConfigError: others can read it, it is no key file, or it cannot be made; says what to do.
    """
    path = keyfile.path_of(keyfile.directory(settings), ROLE)
    if not path.exists():
        pair = KeyPair.make()
        try:
            keyfile.save_new(path, KeyFile(ROLE, ROLE, pair, pair.public))
        except FileExistsError:
            pass  # another process of this user was first: its key it is
        except OSError as error:
            raise ConfigError(
                f"cannot be made: {error.strerror}. By this key processes of one user know one another on loopback "
                f"(127.0.0.1); set {KEY_DIR} to a directory of yours where it can be",
                path=str(path),
            ) from None
    return keyfile.load(path)
