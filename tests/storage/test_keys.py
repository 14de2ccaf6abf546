"""API keys on disk."""

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud.storage.database_file import DATABASE_NAME
from tinkercloud.storage.keys import KeyStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyStore]:
    store = KeyStore(tmp_path / "data")
    yield store
    store.close()


def test_the_first_key_is_made_once(store: KeyStore) -> None:
    key = store.ensure_first_key()
    assert key is not None
    assert key.startswith("tml-")
    assert store.user_of(key) == "default"
    assert store.ensure_first_key() is None


def test_keys_belong_to_their_users(store: KeyStore) -> None:
    ann, bob = store.add("ann"), store.add("bob")
    assert (store.user_of(ann), store.user_of(bob)) == ("ann", "bob")
    assert store.user_of(ann + "x") is None
    assert store.user_of("") is None


def test_a_revoked_key_stops_working(store: KeyStore) -> None:
    key = store.add("ann")
    assert store.user_of(key) == "ann"
    [listed] = store.list()
    assert listed.user == "ann"
    assert listed.role == "user"
    assert listed.created_at > 0
    assert store.revoke(listed.key_id)
    assert store.user_of(key) is None
    assert not store.revoke(listed.key_id)


def test_a_key_added_by_another_process_is_found_at_once(store: KeyStore, tmp_path: Path) -> None:
    assert store.user_of("tml-none") is None
    other = KeyStore(tmp_path / "data")
    key = other.add("bob")
    other.close()
    assert store.user_of(key) == "bob"


def test_the_plaintext_is_not_on_disk(store: KeyStore, tmp_path: Path) -> None:
    key = store.add("ann")
    files = list((tmp_path / "data").iterdir())
    assert files
    assert all(key.encode() not in file.read_bytes() for file in files)


def test_only_the_owner_may_read_the_files(store: KeyStore, tmp_path: Path) -> None:
    store.add("ann")
    data_dir = tmp_path / "data"
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700
    for file in data_dir.glob(DATABASE_NAME + "*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_survive_a_reopening(store: KeyStore, tmp_path: Path) -> None:
    key = store.add("ann")
    store.close()
    again = KeyStore(tmp_path / "data")
    assert again.user_of(key) == "ann"
    again.close()
    with pytest.raises(sqlite3.ProgrammingError):
        store.list()
