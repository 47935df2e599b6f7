"""What mkdocs does not do by itself: pages made of the code, files outside docs/, links to them.

The README is the first page. The changelog, CONTRIBUTING and the experiments' pages are taken from
where they lie. The reference is written anew by every build, of the classes, commands and
docstrings, and stands in no file.
"""

import html
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fedpact
from fedpact.cli import commands, reference
from fedpact.common.format import toml

ROOT = Path(__file__).parents[1]
_INDEX = "index.md"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```\w+) .*$", re.MULTILINE)
_ITEM = re.compile(r"( *)([-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not lie in docs/: pages from elsewhere, their pictures, the reference."""
    outside = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    outside += sorted((ROOT / "experiments").rglob("*.md"))
    outside += sorted((ROOT / "experiments").rglob("*.svg"))
    made = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in outside}
    made[_INDEX] = (ROOT / "README.md").read_text(encoding="utf-8")
    made |= {f"reference/{name}.md": "".join(page()) for name, page in _REFERENCE.items()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where things lie on the site, and write lists as Python-Markdown wants them.

    A link to a file that is no page, as one of the sources, becomes its text.
    """
    del config
    own = page.file.src_uri
    known = {file.src_uri for file in files}

    def there(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        address, _, place = target.partition("#")
        if not address or "://" in address:
            return link[0]
        found = _on_site(_repository(own, address))
        if found in known:
            away = os.path.relpath(found, PurePosixPath(own).parent)
            return f"{picture}[{text}]({away}{'#' + place if place else ''})"
        if not (ROOT / _repository(own, address)).exists():
            return link[0]  # which mkdocs then complains of
        return text

    # A word behind a block's language is for our tests.
    return _lists(_FENCE.sub(r"\1", _LINK.sub(there, markdown)))


def _repository(page: str, address: str) -> str:
    """Where a link of a page leads, as a path of the repository."""
    if page == _INDEX:
        home = PurePosixPath()
    elif (ROOT / "docs" / page).exists() or page.startswith("reference/"):
        home = PurePosixPath("docs", page).parent
    else:
        home = PurePosixPath(page).parent
    return os.path.normpath(home / address)


def _on_site(path: str) -> str:
    """Where the site has a file of the repository."""
    return _INDEX if path == "README.md" else path.removeprefix("docs/")


def _lists(markdown: str) -> str:
    """Write lists that follow a paragraph, or are indented by two or three, with what they need."""
    found, fenced, depth = list[str](), False, [0]
    for line in markdown.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        item = None if fenced else _ITEM.match(line)
        if item:
            while len(depth) > 1 and len(item[1]) < depth[-1]:
                depth.pop()
            if len(item[1]) > depth[-1]:
                depth.append(len(item[1]))
            before = found[-1] if found else ""
            if before and not _ITEM.match(before) and not before.startswith(" "):
                found.append("")
            line = "    " * (len(depth) - 1) + line.lstrip()
        elif line and not line.startswith(" "):
            depth = [0]
        found.append(line)
    return "\n".join(found)


def _configuration() -> Iterator[str]:
    yield "# Configuration\n\n"
    yield "Every key of a plan. `fedpact init --all` writes them into a file, `fedpact settings` "
    yield "shows them on the command line, `--set TABLE.KEY=VALUE` sets one for a single run.\n\n"
    for table in reference.tables():
        yield from _table(table, f"[{table.name}]" if table.name else "Outside of all tables")


def _deployment() -> Iterator[str]:
    yield "# A deployment's files\n\n"
    yield "`fedpact deploy init` writes them; "
    yield "[Operate a deployment](../how-to/operate-a-deployment.md) explains them.\n\n"
    for table in reference.everything():
        if table.name.startswith(tuple(reference.FILES)):
            yield from _table(table, table.name)


def _algorithms() -> Iterator[str]:
    yield "# Algorithms\n\n"
    yield "Each is one file; what it says at its top stands here, with its `[settings]`. "
    yield "`fedpact algorithms NAME` shows the same.\n\n"
    for name in reference.algorithm_names():
        one = reference.algorithm(name)
        yield from _table(one.settings, name, about="")
        yield f"```text\n{one.text}\n```\n\n"


def _table(table: reference.KeyTable, title: str, about: str | None = None) -> Iterator[str]:
    anchor = table.name.replace(" ", "-").strip("[]") or "top"
    yield f"## {title} {{ #{title if about == '' else anchor} }}\n\n"
    yield f"{_safe(table.about if about is None else about)}\n\n"
    yield "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
    for key in table.keys:
        symbol = f"{_safe(key.symbol)}: " if key.symbol else ""
        default = "left out" if key.default is None else f"`{_cell(toml(key.default))}`"
        cells = (
            f"`{key.last}`",
            _safe(f"{key.type} {key.range}".strip()),
            "to be given" if key.required else default,
            symbol + _safe(key.meaning),
        )
        yield f"| {' | '.join(cells)} |\n"
    yield "\n"


def _commands() -> Iterator[str]:
    yield "# Commands\n\n"
    yield "`fedpact COMMAND --help` says the same. With `--json` a command prints one JSON "
    yield "document and nothing else.\n\n"
    for name in commands.names():
        yield from _command(commands.load(name), f"fedpact {name}")


def _command(command: click.Command, name: str) -> Iterator[str]:
    inner = dict[str, click.Command](getattr(command, "commands", {}))
    if inner:
        for last, one in sorted(inner.items()):
            yield from _command(one, f"{name} {last}")
        return
    yield f"## {name} {{ #{name.replace(' ', '-')} }}\n\n"
    yield from _prose_of(inspect.cleandoc(command.help or ""))
    if shown := commands.examples(name.removeprefix("fedpact ")):
        yield "```sh\n" + "\n".join(shown) + "\n```\n\n"
    yield "| | default | |\n| --- | --- | --- |\n"
    for given in command.params:
        told: Any = given
        if getattr(told, "hidden", False) or "--help" in given.opts:
            continue
        option = given.param_type_name == "option"
        names = ", ".join(given.opts) if option else given.human_readable_name
        default = "" if told.default in (None, [], (), False) else f"`{told.default}`"
        default = "to be given" if given.required else default
        yield f"| `{names}` | {default} | {_safe(getattr(told, 'help', None) or '')} |\n"
    yield "\n"


def _python() -> Iterator[str]:
    yield "# Python\n\nWhat `import fedpact` gives; all else is internal and may change.\n\n"
    for name in fedpact.__all__:
        thing = getattr(fedpact, name)
        yield f"## fedpact.{name}\n\n"
        if not inspect.isclass(thing):
            yield from _function(thing, f"fedpact.{name}")
            continue
        yield from _prose(thing)
        for own, member in sorted(vars(thing).items()):
            wrapped = getattr(member, "__func__", None) or getattr(member, "func", None)
            wrapped = wrapped or getattr(member, "fget", None) or member
            if own.startswith("_") or not inspect.isfunction(wrapped):
                continue
            yield f"### {name}.{own}\n\n"
            yield from (
                _function(wrapped, f"{name}.{own}")
                if inspect.isfunction(member) or hasattr(member, "__func__")
                else _prose(wrapped)
            )


def _function(function: Callable[..., Any], name: str) -> Iterator[str]:
    asked = [str(one) for one in inspect.signature(function).parameters.values()]
    asked = [re.sub(r"\b(?:[a-z_]+\.)+", "", one) for one in asked if one not in ("self", "cls")]
    one = f"{name}({', '.join(asked)})"
    many = "\n".join([f"{name}(", *(f"    {part}," for part in asked), ")"])
    yield f"```python\n{one if len(one) < 80 else many}\n```\n\n"
    yield from _prose(function)


def _prose(thing: Any) -> Iterator[str]:
    yield from _prose_of(inspect.getdoc(thing) or "")


def _prose_of(text: str) -> Iterator[str]:
    """A docstring: paragraphs, and as code what is indented or an example."""
    for part in text.split("\n\n"):
        code = part.startswith((" ", ">>>"))
        yield f"```text\n{part}\n```\n\n" if code else f"{_safe(part)}\n\n"


def _safe(text: str) -> str:
    """Text that stands for itself in Markdown and its tables, but for `code`."""
    parts = re.split(r"(`[^`\n]+`)", text)
    plain = [html.escape(part, quote=False) for part in parts[::2]]
    parts[::2] = [re.sub(r"([*_\[\]|])", r"\\\1", part) for part in plain]
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_REFERENCE: dict[str, Callable[[], Iterator[str]]] = {
    "configuration": _configuration,
    "algorithms": _algorithms,
    "deployment": _deployment,
    "commands": _commands,
    "python": _python,
}
