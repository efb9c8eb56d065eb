"""A client without rlinf-actors, which calls a method of a worker. It needs pyzmq and msgpack only.

docs/reference/wire.md describes the protocol. Launch a group in a namespace of a cluster, then run::

    python examples/wire_client.py ENDPOINT NAMESPACE                         # print nodes and groups as JSON
    python examples/wire_client.py ENDPOINT NAMESPACE GROUP RANK METHOD 1 '"a"'   # call METHOD(1, "a")

ENDPOINT is the head's address, such as ipc:///run/user/1000/…/head.sock or tcp://127.0.0.1:6380. On TCP you need a
key: ``--key FILE`` names a key file made by `rlinf-actors keys`.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import os
import platform
import time
from typing import Any, TypeAlias, cast

import msgpack  # type: ignore[import-untyped]
import zmq
from zmq.utils import z85

PROTOCOL = 1  # the protocol that this client speaks
JOIN, REJECTED, CALL, OK, RAISED = 0, 1, 3, 7, 9  # tags of frames
PATIENCE_S = 30.0

Curve = tuple[bytes, bytes, bytes]
"""(public key of the server, our public key, our secret key), in Z85."""
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


def pack(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value))


class Link:
    """A DEALER socket to the head or to a worker. Sends and receives messages: a header and its parts."""

    def __init__(self, context: Context, endpoint: str, name: str, curve: Curve | None) -> None:
        self._arrived: collections.deque[tuple[Any, list[bytes]]] = collections.deque()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, f"{name}#{os.urandom(8).hex()}".encode())
        self._socket.setsockopt(zmq.LINGER, 200)
        if curve is not None:
            self._socket.curve_serverkey, self._socket.curve_publickey, self._socket.curve_secretkey = curve
        self._socket.connect(endpoint)

    def send(self, header: Any, *parts: bytes) -> None:
        self._socket.send(pack([[pack(header), *parts]]))  # a chunk of one message

    def receive(self, seconds: float) -> tuple[Any, list[bytes]] | None:
        """Return the next message, None if there is none within *seconds*."""
        if not self._arrived and self._socket.poll(max(0, int(seconds * 1000))):
            records, *big = self._socket.recv_multipart()
            for header, *parts in msgpack.unpackb(records):
                found = [big[part] if isinstance(part, int) else part for part in parts]
                self._arrived.append((msgpack.unpackb(header), found))
        return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        self._socket.close()


class Head:
    """A session with the head, as a driver of a job."""

    def __init__(self, context: Context, endpoint: str, namespace: str, curve: Curve | None) -> None:
        self.incarnation, self.namespace = os.urandom(8).hex(), namespace
        self._ids, self._word, self._next_beat = itertools.count(1), 0.0, float("inf")
        self._link = Link(context, endpoint, f"driver:{self.incarnation}", curve)
        hello = {"protocol": PROTOCOL, "version": "wire_client", "incarnation": self.incarnation}
        hello |= {"role": "driver", "namespace": namespace, "host": "another", "pid": 0, "pid_start": 0}
        self.welcome = self.ask("ClientHello", **hello)
        self._next_beat = time.monotonic() + self.welcome["beat_s"]

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._link.send({"type": "req", "id": number, "body": {"type": kind, **fields}})
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self.beat()
            for message in self._read(0.1):
                if message["type"] == "rep" and message["id"] == number:
                    body: dict[str, Any] = message["body"]
                    return body
                if message["type"] == "err" and message["id"] == number:
                    raise RuntimeError(f"{message['kind']}: {message['text']}")
        raise TimeoutError(f"the head did not answer a {kind}")

    def beat(self) -> None:
        """Send a beat if the next beat is due. Call this at least four times in a lease."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self.welcome["beat_s"]
        for _ in self._read(0):
            pass
        self._notify("Beat", incarnation=self.incarnation, word=self._word)

    def close(self) -> None:
        self._notify("Goodbye", reason="the client ends")
        self._link.close()

    def _notify(self, kind: str, **fields: Any) -> None:
        self._link.send({"type": "not", "body": {"type": kind, **fields}})

    def _read(self, seconds: float) -> list[dict[str, Any]]:
        """Return the messages that arrived. Remember the head's word; drop other notices."""
        found: list[dict[str, Any]] = []
        while (message := self._link.receive(0 if found else seconds)) is not None:
            found.append(message[0])
            body = message[0].get("body", {})
            if body.get("type") == "Beat" and body.get("incarnation") == self.welcome["epoch"]:
                self._word = body.get("word", 0.0)
        return found


class Worker:
    """A link to one worker of *group*, a GroupState from the head."""

    def __init__(self, context: Context, head: Head, group: dict[str, Any], rank: int) -> None:
        state = next(worker for worker in group["workers"] if worker["rank"] == rank)
        endpoint, token = state["endpoint"], group["token"]
        near = os.path.exists(endpoint.get("ipc", "").removeprefix("ipc://"))
        self._head, self._ids = head, itertools.count(1)
        name = f"driver:{head.incarnation}"
        self._link = Link(context, endpoint["ipc" if near else "tcp"], name, None if near else job_curve(token))
        python = platform.python_version()
        self._link.send([JOIN, PROTOCOL, "wire_client", python, name, token, state["id"]])

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        number = next(self._ids)
        parts = [b"A" + pack([args, kwargs])] if args or kwargs else []
        self._link.send([CALL, number, method], *parts)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self._head.beat()
            message = self._link.receive(0.1)
            if message is None:
                continue
            (tag, *fields), parts = message
            if tag == REJECTED:
                raise RuntimeError(f"the worker refused the link: {fields[1]}")
            if tag == OK and fields[0] == number:
                return value_of(parts)
            if tag == RAISED and fields[0] == number:
                raise RuntimeError(f"{method}() raised {fields[2]}: {fields[3]}")
        raise TimeoutError(f"{method}() did not end")

    def close(self) -> None:
        self._link.close()


def value_of(parts: list[bytes]) -> Any:
    """Return the value of a plain payload."""
    if not parts:
        return None
    if parts[0][:1] == b"M":
        return msgpack.unpackb(parts[0][1:])
    if parts[0][:1] == b"B":
        return parts[1]
    raise RuntimeError("the value is pickled: only Python can read it. Return None, bool, int, float, str or bytes")


def job_curve(token: str) -> Curve:
    """Derive the key pair of a job from its token. Both ends of a link to a worker use it."""
    secret = z85.encode(hashlib.sha256(b"rlinf-actors job pair\0" + token.encode()).digest())
    return zmq.curve_public(secret), zmq.curve_public(secret), secret


def key_file(path: str) -> Curve:
    """Return the head's public key and the client's own key pair, as a key file holds them."""
    with open(path, encoding="utf-8") as file:
        fields = dict(line.split() for line in file if line.strip() and not line.startswith("#"))
    return fields["head"].encode(), fields["public"].encode(), fields["secret"].encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="call a worker's method without rlinf-actors")
    parser.add_argument("endpoint")
    parser.add_argument("namespace")
    parser.add_argument("group", nargs="?")
    parser.add_argument("rank", nargs="?", type=int, default=0)
    parser.add_argument("method", nargs="?")
    parser.add_argument("arguments", nargs="*", type=json.loads)
    parser.add_argument("--key")
    asked = parser.parse_args()
    curve = key_file(asked.key) if asked.key else None
    with zmq.Context() as context:
        head = Head(context, asked.endpoint, asked.namespace, curve)
        try:
            if asked.group is None:
                nodes, status = head.ask("GetNodes")["nodes"], head.ask("GetStatus", namespace=asked.namespace)
                here = [[node.get("rank"), node["report"]["hostname"], node["state"]] for node in nodes]
                print(json.dumps({"nodes": here, "groups": [group["name"] for group in status["groups"]]}))
                return
            group = head.ask("FindGroup", namespace=asked.namespace, group=asked.group)["group"]
            worker = Worker(context, head, group, asked.rank)
            try:
                result = worker.call(asked.method, *asked.arguments)
                print(json.dumps(result, default=lambda data: {"bytes": len(data)}))
            finally:
                worker.close()
        finally:
            head.close()


if __name__ == "__main__":
    main()
