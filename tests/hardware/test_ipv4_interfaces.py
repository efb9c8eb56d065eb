"""The interfaces of this machine, and a kernel that does not tell them."""

from __future__ import annotations

import fcntl

import pytest

from rlinf_actors.hardware.interfaces import interface_of, ipv4_interfaces


def test_loopback_is_found() -> None:
    assert interface_of("127.0.0.1") == next(name for name, ip in ipv4_interfaces().items() if ip == "127.0.0.1")


def test_a_kernel_that_lists_no_addresses_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert ipv4_interfaces() == {}
    assert interface_of("127.0.0.1") == ""
    assert "does not list this machine's network addresses" in caplog.text
