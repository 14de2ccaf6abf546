"""docs/operations.md has each setting once, as the settings themselves state it."""

from tests.docs.settings_tables import PAGE, names_of, with_tables
from tinkercloud.config import settings


def test_the_tables_are_those_of_the_settings():
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "write them anew: python -m tests.docs.settings_tables"


def test_every_setting_is_in_one_table():
    assert sorted(names_of(PAGE.read_text(encoding="utf-8"))) == sorted(settings())
