"""Which HTTP requests are served: those that carry the token, and that no other site made a browser send. Pure.

Every user of this machine reaches a port on loopback, and so does every web page that this user's browser shows: by a
request to http://127.0.0.1:PORT, or by a name of its own that leads here (DNS rebinding). Therefore:

* only GET and HEAD, which change nothing;
* the Host header must name this server, which a rebound name does not;
* Origin, if there is one, must be this server's, and Sec-Fetch-Site must not say that another site asks;
* a token, once in the URL and then in a cookie that scripts cannot read and that no other site sends along; programs
  send it as "Authorization: Bearer TOKEN".

Whoever fails one of these learns which, and nothing about the cluster.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

import msgspec

METHODS = ("GET", "HEAD")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
SAME_SITE = ("same-origin", "none")
"""Values of Sec-Fetch-Site for requests of our own page, and of the user who typed the address."""
TOKEN_BYTES = 32
LEAST_CHARS = 20
"""Fewest characters of a token that a user has chosen."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not served: the HTTP status, and a text for people."""

    status: int
    text: str


class Guard:
    """Decides about requests.

    Args:
        port: the port that this server listens on.
        token: the secret that requests must carry.
        hosts: further values of the Host header: of a reverse proxy.
        secure: True if browsers reach this server by https, through a reverse proxy.
    """

    def __init__(self, port: int, token: str, hosts: Collection[str] = (), *, secure: bool = False) -> None:
        self.hosts = {f"{name}:{port}" for name in LOOPBACK_NAMES} | {host.lower() for host in hosts}
        self.cookie = f"rlinf_actors_{port}"  # cookies are sent to all ports of a host
        self.secure = secure
        self._token = token
        self.session = hmac.new(token.encode(), b"rlinf-actors session", hashlib.sha256).hexdigest()

    def refusal(self, method: str, headers: Mapping[str, str], *, opens: bool = False) -> Refusal | None:
        """Return why a request is not served; None if it is.

        *opens* is True for a request that has no cookie yet, because its URL carries the token (`opens_session`).
        """
        if method not in METHODS:
            return Refusal(405, "only GET: this server changes nothing")
        host = headers.get("Host", "").lower()
        if host not in self.hosts:
            return Refusal(403, "the Host header does not name this server (--host NAME:PORT allows a reverse proxy's)")
        origin = headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() not in self.hosts:
            return Refusal(403, "another site asks: the Origin header is not this server's")
        if headers.get("Sec-Fetch-Site", "none") not in SAME_SITE:
            return Refusal(403, "another site asks (Sec-Fetch-Site): open the address in a new tab")
        if not opens and not self._is_known(headers):
            return Refusal(401, "the token is missing: open the address that `rlinf-actors serve` has printed")
        return None

    def opens_session(self, token: str) -> bool:
        """Return True if *token*, of a URL, is the right one: the answer then sets the cookie."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _is_known(self, headers: Mapping[str, str]) -> bool:
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.opens_session(given.strip())
        try:
            found = SimpleCookie(headers.get("Cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self.session.encode())


def new_token() -> str:
    """Return a new secret."""
    return secrets.token_urlsafe(TOKEN_BYTES)
