"""Read every frame of this namespace's eth0 until STOP appears, and print the other words that appeared.

    python sniffer.py STOP WORD...

Frames of each direction of a connection are joined, so that a word in two segments is found too.
"""

from __future__ import annotations

import json
import socket
import sys

ETH_P_ALL = 3
SO_RCVBUFFORCE = 33
HEADERS = 14 + 20 + 20
"""Of Ethernet, IPv4 and TCP without options, which are rubbish between two segments and seldom hide a word."""


def main() -> None:
    stop, *words = (word.encode() for word in sys.argv[1:])
    streams: dict[bytes, bytearray] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as wire:
        wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        wire.bind(("eth0", 0))
        print("listening", flush=True)
        total = 0
        while True:
            frame = wire.recv(1 << 17)
            if frame[12:14] != b"\x08\x00":
                continue
            tcp = 14 + 4 * (frame[14] & 15)
            start = tcp + 4 * (frame[tcp + 12] >> 4) if frame[23] == 6 else tcp + 8
            end = 14 + int.from_bytes(frame[16:18], "big")
            payload = frame[start:end]
            total += len(payload)
            streams.setdefault(frame[26 : tcp + 4], bytearray()).extend(payload)
            if stop in payload:
                break
    seen = [word.decode() for word in words if any(word in stream for stream in streams.values())]
    print(json.dumps({"bytes": total, "seen": seen, "curve": sum(b"CURVE" in s[:100] for s in streams.values())}))


main()
