"""docs/overview.svg is what its script draws, well formed, and readable in both themes."""

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.serving import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def overview() -> ModuleType:
    path = ROOT / "docs" / "overview.py"
    spec = importlib.util.spec_from_file_location("overview_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_up_to_date(overview: ModuleType) -> None:
    drawn = Path(overview.TARGET).read_text(encoding="utf-8")
    assert drawn == overview.draw(), "run docs/overview.py"


def test_every_part_lies_on_the_card(overview: ModuleType) -> None:
    picture = ElementTree.fromstring(overview.draw())
    for box in picture.iter(f"{SVG}rect"):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= overview.WIDTH
        assert overview.TOP <= y <= y + height <= overview.TOP + overview.HEIGHT


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_text_stands_out_from_every_surface(overview: ModuleType, theme: str) -> None:
    """4.5 to 1, as WCAG 2 asks for (its definition of contrast)."""
    palette: dict[str, str] = getattr(overview, theme)
    surfaces = palette.keys() - {"edge", "text", "faint"}
    for surface in surfaces:
        for text in ("text", "faint"):
            assert contrast(palette[surface], palette[text]) >= 4.5, (surface, text)


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
