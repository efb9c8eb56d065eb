"""Posts one event to a web page. `head.hooks` runs this file by its path, in a process of its own: so a slow server, a
name that does not resolve and a proxy hold up nothing, and a time limit holds. It imports the standard library only.

The process reads one JSON object from stdin, because it has secrets: "url", "token" ("" for none), "timeout_s" and
"event". Exit code 0 if the server answered 2xx; else FAILED and one line on stderr, without the URL and the token.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

FAILED = 75
"""Exit code that Python itself does not have."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:  # the token is for one server
        return None


def main() -> int:
    asked = json.load(sys.stdin)
    headers = {"Content-Type": "application/json", "User-Agent": "rlinf-actors"}
    if asked["token"]:
        headers["Authorization"] = f"Bearer {asked['token']}"
    request = urllib.request.Request(asked["url"], json.dumps(asked["event"]).encode(), headers)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=asked["timeout_s"]) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
        error.close()
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = getattr(reason, "strerror", None) or type(reason).__name__  # its own text may have the URL
        sys.stderr.write(f"the server cannot be reached: {text}\n")
        return FAILED
    if not 200 <= status < 300:
        sys.stderr.write(f"the server answered with status {status}\n")
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
