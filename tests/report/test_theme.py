"""The colours of pages: each is legible in both schemes."""

import pytest

from fedpact.common.notebook import DARK, LIGHT, css

LINES = ("blue", "red", "green", "orange", "pink", "sky", "grey", "axis")


def luminance(colour):
    """WCAG 2's relative luminance of #rrggbb."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out(scheme):
    assert set(scheme) == set(LIGHT)
    for text in ("ink", "soft", "link", "bad", "warn"):
        assert contrast(scheme[text], scheme["page"]) >= 4.5, text
    for line in LINES:
        assert contrast(scheme[line], scheme["page"]) >= 3, line


def test_paper_is_light_and_a_notebooks_theme_goes_first():
    # Dark is within a screen's rules alone; a notebook's own attribute comes after the system's.
    before, rest = css().split("@media screen and (prefers-color-scheme:dark)")
    assert DARK["page"] not in before
    assert rest.index("data-jp-theme-light") > rest.index(DARK["page"])
