"""What the head of the year tells of events: a program that runs in the sandbox of the head's unit, and a web page.

At first both fail: the program may not write where it does, and no server listens at the page's address. `mend`
corrects that, as an administrator does; the next head uses it.
"""

from __future__ import annotations

import http.server
import json
import os
import threading
from pathlib import Path

PROGRAM, TOKEN, CONFIG = "page-the-lab", "webhook-token", "head.toml"
FORBIDDEN, ALLOWED = "/var/log/told", "/var/lib/rlinf-head/told"
"""Files to which the program appends events."""


class Hooks:
    """The hooks of a head on a machine.

    Args:
        root: the file system of that machine, as this process sees it.
        gid: id of the head's group.
    """

    def __init__(self, root: Path, gid: int) -> None:
        self._root = root
        self._place = root / "etc/rlinf-actors"
        self._server = _Page()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._write(PROGRAM, '#!/bin/sh\n{ cat; echo; } >> "$1"\n', 0o755)
        self._write(TOKEN, "secret-token", 0o640)
        os.chown(self._place / TOKEN, 0, gid)
        self._configure(FORBIDDEN)

    def _configure(self, file: str) -> None:
        port = self._server.server_port
        text = f'[notify]\ncommand = ["/etc/rlinf-actors/{PROGRAM}", "{file}"]\n'
        text += f'webhook = "http://127.0.0.1:{port}/events"\ntoken_file = "/etc/rlinf-actors/{TOKEN}"\n'
        self._write(CONFIG, text, 0o644)

    def _write(self, name: str, text: str, mode: int) -> None:
        (self._place / name).write_text(text)
        (self._place / name).chmod(mode)

    def mend(self) -> None:
        self._configure(ALLOWED)
        self._server.server_activate()
        self._thread.start()

    def told(self) -> dict[str, list[int]]:
        """Return the numbers of the events that each hook has told."""
        lines = (self._root / ALLOWED[1:]).read_text().splitlines()
        return {"command": [json.loads(line)["seq"] for line in lines], "webhook": list(self._server.posted)}

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Page(http.server.HTTPServer):
    """A server that has its port, but does not listen yet."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post, bind_and_activate=False)
        self.server_bind()
        self.posted: list[int] = []


class _Post(http.server.BaseHTTPRequestHandler):
    server: _Page

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.headers["Authorization"] == "Bearer secret-token"
        if known:
            self.server.posted.append(event["seq"])
        self.send_response(200 if known else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
