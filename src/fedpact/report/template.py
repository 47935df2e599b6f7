"""Pages from templates: one file each, which fetches nothing, with the style in it."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from fedpact.common.format import count_noun, percent
from fedpact.common.notebook import css


def page(name: str, **values: Any) -> str:
    """Return the template NAME.html.j2 filled in, as one HTML document."""
    style = f"{css()}\n{_text('style.css')}"
    return _environment().get_template(f"{name}.html.j2").render(style=style, **values)


@cache
def _environment() -> Environment:
    found = Environment(autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(_text))
    found.globals.update(counted=count_noun, percent=percent)
    return found


def _text(name: str) -> str:
    return files("fedpact.report").joinpath(name).read_text(encoding="utf-8")
