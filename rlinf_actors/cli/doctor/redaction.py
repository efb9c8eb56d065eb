"""Removes secrets and users' data from what `rlinf-actors doctor --bundle` writes. Pure.

Three nets, one behind the other. Values that this process knows to be secret are removed wherever they appear. Fields
whose names say that they hold a secret or output of users lose their values. And texts lose what looks like a secret,
and messages of exceptions, which are words of users' code. Names of jobs, groups, nodes, users and files stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

REMOVED = "[removed]"
MIN_SECRET = 6
"""Shortest value that is removed wherever it appears: a shorter one is part of many words."""
_SECRET_NAME = re.compile(
    r"(?i)token|secret|passw|credential|api_?key|apikey|access_?key|private|auth|cookie|webhook|signature|_key$"
)
_OUTPUT = frozenset({"stderr_tail", "detail", "env", "env_vars", "notify"})
"""Fields that hold output or data of users, or environments."""
_SAFE_NAMES = frozenset({"cluster_keys", "keys", "key"})
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|\Z)", re.DOTALL), REMOVED),
    (re.compile(r"(\w+://)[^/\s@:]*:[^/\s@]*@"), rf"\1{REMOVED}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {REMOVED}"),
    (
        re.compile(
            r"(?i)\b([\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|credential|access[_-]?key)[\w-]*)(['\"]?\s*[:=]\s*"
            r"['\"]?)[^\s'\",;]{4,}"
        ),
        rf"\1\2{REMOVED}",
    ),
    (re.compile(r"\b(?:sk-|ghp_|gho_|github_pat_|hf_|xox[a-z]-|AKIA|glpat-|wandb_)[A-Za-z0-9_-]{8,}"), REMOVED),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), REMOVED),  # a JSON web token
    (re.compile(r"rlinf-join-[\w=-]*"), REMOVED),  # a join token
    (re.compile(r"(?i)\b(secret\s+)\S{40}"), rf"\1{REMOVED}"),  # a key file
)
_ERRNO = r"(?!\[Errno \d+\])"
_MESSAGES = (
    re.compile(r"(its script (?:failed: [\w.]+(?=:)|exited with(?! code -?\d))).*", re.DOTALL),
    re.compile(
        r"\b((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Failure)): "
        rf"(?!\[removed\]){_ERRNO}[^\n]*"
    ),
    re.compile(r"(\[Errno \d+\] [A-Z][A-Za-z ]*)[^\n]*"),
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):.*", re.DOTALL)


class Redactor:
    """Removes secrets and data of users from texts and JSON values.

    Args:
        secrets: values that must not be in the result.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted({one for one in secrets if len(one) >= MIN_SECRET}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        """Return *text* without secrets, tracebacks, and messages of exceptions."""
        if self._secrets is not None:
            text = self._secrets.sub(REMOVED, text)
        text = _TRACEBACK.sub(f"{REMOVED} (a traceback)", text)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        for pattern in _MESSAGES[:2]:
            text = pattern.sub(rf"\1: {REMOVED}", text)
        return _MESSAGES[2].sub(rf"\1 {REMOVED}", text)

    def value(self, value: Any, name: str = "") -> Any:
        """Return a value of JSON, or of TOML, without secrets. *name* is the key that has it."""
        if name in _OUTPUT or (
            name not in _SAFE_NAMES and _SECRET_NAME.search(name) and isinstance(value, (str, list))
        ):
            return self._without(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(one, str(key)) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(one, name) for one in value]
        return self.text(value) if isinstance(value, str) else value

    def _without(self, value: Any) -> Any:
        """Return what may be known of a value: its keys, its number of elements, and whether it is empty."""
        if isinstance(value, dict):
            return dict.fromkeys(map(self.text, map(str, value)), REMOVED)
        if isinstance(value, (list, tuple)):
            return [REMOVED] * len(value)
        return REMOVED if value else value
