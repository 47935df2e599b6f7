"""The colours of pages and figures, for light and dark: names, and what a browser is told of them.

A figure is drawn in the light ones, and its SVG says `var(--NAME)` for each, so that one drawing
serves both. Text has a contrast of at least 4.5 : 1 on what it stands on, a line one of 3 : 1.
"""

import re
from typing import Final

LIGHT: Final = {
    "page": "#ffffff",
    "ink": "#1f2933",
    "soft": "#52606d",
    "line": "#e4e7eb",
    "axis": "#7b8794",
    "wash": "#f7f8fa",
    "link": "#0b5a8f",
    "bad": "#a61b1b",
    "bad-wash": "#fdecea",
    "warn": "#855600",
    "warn-wash": "#fff8e6",
    "warn-line": "#c3a15a",
    # After Okabe and Ito: told apart with any colour vision, and in print by their lightness.
    "blue": "#0072b2",
    "red": "#d04a02",
    "green": "#00875f",
    "orange": "#b27700",
    "pink": "#b5578f",
    "sky": "#3a8fbf",
    "grey": "#6b7280",
}
DARK: Final = {
    "page": "#12161b",
    "ink": "#e8edf2",
    "soft": "#aab5c1",
    "line": "#2f3842",
    "axis": "#7a8794",
    "wash": "#1a2027",
    "link": "#7cc0f5",
    "bad": "#ff9a94",
    "bad-wash": "#3a1a1a",
    "warn": "#f0c36a",
    "warn-wash": "#322813",
    "warn-line": "#8a6d2c",
    "blue": "#4fa8e8",
    "red": "#ff8552",
    "green": "#35c79a",
    "orange": "#e8b04a",
    "pink": "#e39bc4",
    "sky": "#9ad4f5",
    "grey": "#9aa5b1",
}
_NAMES: Final = {colour: name for name, colour in LIGHT.items()}


def apply_theme(svg: str) -> str:
    """Return SVG whose colours are those of the page that it stands in."""
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda found: f"var(--{_NAMES[found[0]]})" if found[0] in _NAMES else found[0],
        svg,
    )


def css() -> str:
    """Return the rules that give every name its colour within class "fedpact".

    Light on paper and where nobody asks for dark; a notebook's own theme goes before the system's.
    """
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in colours.items())
        for colours in (LIGHT, DARK)
    )
    light, dark = f"{light}color-scheme:light;", f"{dark}color-scheme:dark;"
    notebook = '[data-jp-theme-light="{}"] .fedpact'.format
    return "\n".join(
        (
            f".fedpact{{{light}}}",
            f"@media screen and (prefers-color-scheme:dark){{.fedpact{{{dark}}}}}",
            f"@media screen{{{notebook('true')}{{{light}}}{notebook('false')}{{{dark}}}}}",
        )
    )
