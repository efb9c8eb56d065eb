"""Which stores of torch's rendezvous listen on one address, with torches that exist and that existed."""

from __future__ import annotations

import logging
import os
import socket
import sys
import types

import pytest

from rlinf_actors.net.host import HeldPorts
from rlinf_actors.worker import master_store

HERE = "127.0.0.1"


@pytest.fixture
def port():
    ports = HeldPorts()
    yield ports.hold()
    ports.close()


def torch_with(monkeypatch, port, refuses=None, address=HERE):
    """Return a rendezvous module whose TCPStore is a fake, after the worker has begun, and what the fake was given."""
    given = []

    def tcp_store(**named):
        if "master_listen_fd" in named and refuses not in (None, "libuv" if "use_libuv" in named else None):
            raise TypeError("no socket") if refuses == "sockets" else NotImplementedError("no socket")
        given.append(named)
        if "master_listen_fd" in named:
            with socket.socket(fileno=named["master_listen_fd"]) as listener:
                named["at"] = listener.getsockname()[:2]

    module = types.ModuleType(master_store.RENDEZVOUS)
    module.TCPStore = tcp_store
    monkeypatch.setitem(sys.modules, master_store.RENDEZVOUS, module)
    env = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    master_store.serve_on_one_address(env, logging.getLogger("worker"))
    return module, given


def test_the_store_of_rank_0_listens_on_master_addr(monkeypatch, port):
    module, given = torch_with(monkeypatch, port)
    module.TCPStore(host_name=HERE, port=port, is_master=True)
    assert given[0]["at"] == (HERE, port)


def test_a_torch_that_names_few_arguments_listens_there_too(monkeypatch, port):
    module, given = torch_with(monkeypatch, port)
    module.TCPStore(HERE, port, 2, True, 30.0, multi_tenant=True)
    assert given[0]["at"] == (HERE, port)
    assert (given[0]["world_size"], given[0]["timeout"], given[0]["multi_tenant"]) == (2, 30.0, True)


@pytest.mark.parametrize("other", [{"is_master": False}, {"host_name": "10.0.0.1"}, {"port": 1}])
def test_other_stores_are_left_to_torch(monkeypatch, port, other):
    module, given = torch_with(monkeypatch, port)
    asked = {"host_name": HERE, "port": port, "is_master": True, **other}
    module.TCPStore(**asked)
    assert given == [asked]


def test_a_torch_that_takes_a_socket_only_without_libuv_gets_it_so(monkeypatch, port, caplog):
    module, given = torch_with(monkeypatch, port, "libuv")
    module.TCPStore(host_name=HERE, port=port, is_master=True)
    assert (given[0]["use_libuv"], given[0]["at"]) == (False, (HERE, port))
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "said"),
    [({"refuses": "sockets"}, "takes no socket"), ({"address": "192.0.2.1"}, "no address of this process")],
)
def test_a_store_on_every_address_is_in_the_workers_log(monkeypatch, port, caplog, options, said):
    module, given = torch_with(monkeypatch, port, **options)
    asked = {"host_name": options.get("address", HERE), "port": port, "is_master": True}
    module.TCPStore(**asked)
    assert given == [asked]
    [record] = caplog.records
    assert "listens on every address" in record.getMessage()
    assert said in record.getMessage()


def test_a_store_that_fails_closes_its_socket_once(monkeypatch, port):
    """torch closes the socket of a store whose other ranks do not come; then the number is another file's."""
    module, _ = torch_with(monkeypatch, port)
    later = []

    def no_other_rank_comes(**named):
        os.close(named["master_listen_fd"])
        later.append(os.open(os.devnull, os.O_RDONLY))
        raise RuntimeError("timed out")

    module.TCPStore = no_other_rank_comes
    master_store.serve_on_one_address({"MASTER_ADDR": HERE, "MASTER_PORT": str(port)}, logging.getLogger("worker"))
    with pytest.raises(RuntimeError, match="timed out"):
        module.TCPStore(host_name=HERE, port=port, is_master=True)
    os.close(*later)
    with socket.create_server((HERE, port)):
        pass


def test_a_second_store_at_the_port_is_torchs_affair(monkeypatch, port, caplog):
    module, given = torch_with(monkeypatch, port)
    asked = {"host_name": HERE, "port": port, "is_master": True}
    with socket.create_server((HERE, port)):  # as the store of a group that exists
        module.TCPStore(**asked)
    assert given == [asked]
    assert not caplog.records
