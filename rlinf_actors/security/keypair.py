"""CURVE key pairs as values; the only module beside net's that imports zmq, for its Curve25519, and when it is needed:
whoever looks at key files only does not load it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_actors.errors import ConfigError
from rlinf_actors.security.members import KEY_CHARS, check_public, is_key

SECRET_BYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """One identity. Whoever knows `secret` is it; `repr` never shows that.

    Attributes:
        public: 40 characters of Z85.
        secret: 40 characters of Z85.
    """

    public: str
    secret: str = field(repr=False)

    @classmethod
    def make(cls) -> KeyPair:
        """A new one, from the system's randomness."""
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def of_secret(cls, secret: bytes) -> KeyPair:
        """The pair with this secret of 32 bytes."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret key has {SECRET_BYTES} bytes, not {len(secret)}")
        import zmq
        from zmq.utils import z85

        text: bytes = z85.encode(secret)
        return cls(zmq.curve_public(text).decode(), text.decode())

    @classmethod
    def of_text(cls, public: str, secret: str, path: str) -> KeyPair:
        """The pair that somebody wrote down; *path* says where, for the error.

        Raises:
            ConfigError: they are no keys, or not of one pair. The message has no secret in it.
        """
        import zmq

        check_public(public, path)
        if not is_key(secret):
            raise ConfigError(f"the secret key is not {KEY_CHARS} characters of Z85: copy the file again", path=path)
        if zmq.curve_public(secret.encode()).decode() != public:
            raise ConfigError("the secret key is not that of the public key: copy the file again", path=path)
        return cls(public, secret)
