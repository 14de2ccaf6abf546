"""Drafts as files: whole or not at all, aliases, rollback."""

from pathlib import Path

import pytest

from tinkercloud.errors import NotFound
from tinkercloud.speculative.learning.draft_folder import DraftFolder


def publish(folder: DraftFolder, text: str, **notes: object) -> str:
    return folder.publish(lambda path: (path / "weights").write_text(text) and None, notes)


def text_of(folder: DraftFolder, name: str) -> str:
    return (folder.path(name) / "weights").read_text()


def test_what_is_published_is_the_latest_and_not_yet_the_best(tmp_path):
    folder = DraftFolder(tmp_path / "drafts")
    first = publish(folder, "one", alpha=0.5)
    assert text_of(folder, "latest") == "one"
    assert folder.notes(first) == {"alpha": 0.5, "parent": None}
    with pytest.raises(NotFound, match="no draft is 'best'"):
        folder.resolve("best")


def test_rollback_goes_back_along_what_was_best(tmp_path):
    folder = DraftFolder(tmp_path)
    for text in ("one", "two", "refused", "three"):
        version = publish(folder, text)
        if text != "refused":
            folder.use("best", version)
    assert text_of(folder, "best") == "three"
    folder.rollback()
    assert text_of(folder, "best") == "two"
    folder.rollback()
    assert text_of(folder, "best") == "one"
    assert text_of(folder, "latest") == "three"
    with pytest.raises(NotFound, match="no draft before it"):
        folder.rollback()
    assert text_of(folder, "best") == "one"


def test_a_version_that_breaks_off_while_written_is_never_seen(tmp_path):
    folder = DraftFolder(tmp_path)
    publish(folder, "one")

    def breaks(path: Path) -> None:
        (path / "weights").write_text("ha")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        folder.publish(breaks, {})
    assert folder.versions() == ["draft-000001"]
    assert text_of(folder, "latest") == "one"
    assert publish(folder, "two") == "draft-000002"
    assert text_of(DraftFolder(tmp_path), "latest") == "two"


def test_an_alias_is_replaced_and_never_missing(tmp_path, monkeypatch):
    folder = DraftFolder(tmp_path)
    one, two = publish(folder, "one"), publish(folder, "two")
    folder.use("best", one)
    seen = []
    real = Path.write_text

    def watched(self: Path, *args: object, **more: object) -> int:
        seen.append(folder.resolve("best"))
        count = real(self, *args, **more)
        seen.append(folder.resolve("best"))
        return count

    monkeypatch.setattr(Path, "write_text", watched)
    folder.use("best", two)
    assert seen == [one, one]
    assert folder.resolve("best") == two


def test_old_versions_go_but_those_that_are_named_or_would_be_next_stay(tmp_path):
    folder = DraftFolder(tmp_path, keep=2)
    one = publish(folder, "one")
    folder.use("best", one)
    two = publish(folder, "two")
    folder.use("best", two)
    for i in range(6):
        publish(folder, f"refused {i}")
    assert folder.versions() == [one, two, "draft-000007", "draft-000008"]
    assert folder.rollback() == one


def test_names_that_mean_nothing_are_refused(tmp_path):
    folder = DraftFolder(tmp_path)
    one = publish(folder, "one")
    for name in ("draft-000009", "../outside", ""):
        with pytest.raises(NotFound):
            folder.resolve(name)
        with pytest.raises(NotFound):
            folder.use("best", name)
    with pytest.raises(NotFound, match="no alias"):
        folder.use("worst", one)
