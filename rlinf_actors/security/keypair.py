"""CURVE key pairs as values.

Outside of `net` this is the only module that imports zmq, for its Curve25519. It does so inside functions, so that
programs that only look at key files do not load zmq.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_actors.errors import ConfigError
from rlinf_actors.security.members import KEY_CHARS, check_public, is_key

SECRET_BYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """The CURVE key pair of one member. A process that knows `secret` can act as that member, so `repr` hides the
    secret.

    Attributes:
        public: the public key, 40 characters of Z85.
        secret: the secret key, 40 characters of Z85.
    """

    public: str
    secret: str = field(repr=False)

    @classmethod
    def make(cls) -> KeyPair:
        """Return a new random key pair."""
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def of_secret(cls, secret: bytes) -> KeyPair:
        """Return the key pair of a secret key, which is given as 32 bytes."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret key has {SECRET_BYTES} bytes, not {len(secret)}")
        import zmq
        from zmq.utils import z85

        text: bytes = z85.encode(secret)
        return cls(zmq.curve_public(text).decode(), text.decode())

    @classmethod
    def of_text(cls, public: str, secret: str, path: str) -> KeyPair:
        """Return the key pair of two keys that were read from a file or another text. *path* names their place in
        errors.

        Raises:
            ConfigError: one of the texts is not a key, or the two keys do not belong together. The error does not
                contain the secret.
        """
        import zmq

        check_public(public, path)
        if not is_key(secret):
            raise ConfigError(f"the secret key is not {KEY_CHARS} characters of Z85: copy the file again", path=path)
        if zmq.curve_public(secret.encode()).decode() != public:
            raise ConfigError("the secret key is not that of the public key: copy the file again", path=path)
        return cls(public, secret)
