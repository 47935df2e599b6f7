"""A bar in a notebook's cell, which needs no widgets: one output that is written over."""

import sys
import time
from html import escape
from typing import Any

from fedpact.shown.colours import css

_PAUSE = 0.1


def in_notebook() -> bool:
    """Whether this process answers a notebook."""
    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class Bar:
    """`bar(done, text)`: how far something is. Drawn ten times a second at most, and at its end."""

    def __init__(self, total: int) -> None:
        # Only whoever is in a notebook has it.
        from IPython.display import HTML, display

        self._total, self._drawn, self._html = total, 0.0, HTML
        self._cell: Any = display(HTML(self.html(0, "starting")), display_id=True)

    def __call__(self, done: int, text: str) -> None:
        """Show that so much is done."""
        now = time.monotonic()
        if done >= self._total or now - self._drawn >= _PAUSE:
            self._drawn = now
            self._cell.update(self._html(self.html(done, text)))

    def html(self, done: int, text: str) -> str:
        """Return the bar as it stands in the cell."""
        style = "width:16rem;vertical-align:middle;accent-color:var(--blue)"
        return (
            f"<style>{css()}</style><div class='fedpact' style='background:var(--page);"
            f"color:var(--ink);font:14px system-ui,sans-serif'><progress max={self._total} "
            f"value={done} style='{style}'></progress> {done}/{self._total} {escape(text)}</div>"
        )
