"""Ports that nobody else can take between being chosen and being listened on."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, TCPStore

from tests.ports import reserved_port
from tinkercloud.cluster.gpus.rendezvous import Rendezvous
from tinkercloud.cluster.rollout import router as rollout_router
from tinkercloud.cluster.rollout.engine import free_port
from tinkercloud.cluster.rollout.router import RolloutRouter
from tinkercloud.errors import EngineDied

HERE = "127.0.0.1"


def test_a_rendezvous_binds_its_port_from_the_start():
    with closing(Rendezvous(HERE)) as rendezvous, socket.socket() as other:
        assert rendezvous.init_method == f"tcp://{HERE}:{rendezvous.port}"
        with pytest.raises(OSError, match="in use"):
            other.bind((HERE, rendezvous.port))


def test_a_rank_that_connects_before_the_store_is_open_waits_for_it():
    rendezvous = Rendezvous(HERE)
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(
            lambda: TCPStore(HERE, rendezvous.port, 2, timeout=timedelta(seconds=20)).get("word")
        )
        with pytest.raises(TimeoutError):
            early.result(timeout=0.3)
        store = rendezvous.open(2, timedelta(seconds=20))
        store.set("word", "heard")
        assert early.result(timeout=20) == b"heard"


def test_a_rank_that_does_not_connect_ends_the_wait():
    with pytest.raises(DistStoreError):
        Rendezvous(HERE).open(2, timedelta(seconds=0.5))


def test_a_port_is_free_only_if_it_is_on_every_address(monkeypatch: pytest.MonkeyPatch):
    """torch and SGLang listen on all of them, and one may be in use on loopback alone."""
    with socket.create_server((HERE, 0)) as taken:
        used, spare = taken.getsockname()[1], reserved_port()
        proposals = iter([used, spare])
        monkeypatch.setattr(random, "randrange", lambda *_: next(proposals))
        assert free_port() == spare


async def test_a_router_whose_port_was_taken_starts_at_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server((HERE, 0)) as taken:
        ports = iter([taken.getsockname()[1], *(free_port() for _ in range(3))])
        monkeypatch.setattr(rollout_router, "free_port", lambda: next(ports))
        router = RolloutRouter(HERE, tmp_path / "router.log", "a key")
        await router.start()
        await router.stop()
    assert "in use" in (tmp_path / "router.log").read_text()


async def test_a_router_that_never_starts_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server((HERE, 0)) as taken:
        monkeypatch.setattr(rollout_router, "free_port", lambda: taken.getsockname()[1])
        with pytest.raises(EngineDied, match=r"(?s)did not start.*in use"):
            await RolloutRouter(HERE, tmp_path / "router.log", "a key").start()
