# ruff: noqa
"""Rename identifiers by a table: python scripts/rename.py CHECKOUT [--lenient] [--dry] [--modules].

The table (names.tsv beside this file) has lines `kind  module  old  new  [options]`, separated by
tabs; `#` begins a comment. Kinds:

    class, function, global   a name at the top of a module; module: dotted, or * if it is unique
    method, attribute         old: Class.name; `all` renames it in every class; where unrelated
                              classes have one, too, `receivers:EXPRESSION` says on what it is meant
    parameter                 old: function.name or Class.method.name, with keywords at its calls
    test                      module: the file's path, or *
    text                      module: the file's path; old and new: any text of a Python file
    keep                      module: a file whose strings of code are left as they are

Options: `optional` (text): it may be missing; `all`; `prose`: also replace it as a bare word in prose; `strings`: also replace strings
that are exactly the old name; `private`: nothing outside the module is touched.

mapping.json beside this file ({old module: new module}) says where modules have moved since the
table was written. docstrings.tsv has `module  qualified name  old text  new text`, both escaped as
in Python. Names are resolved by scope; every edit is checked for a new name that is bound already.
Without --lenient any problem stops the run before a file is written.
"""

import argparse
import ast
import builtins
import json
import re
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = ("src", "tests", "benchmarks", "experiments", "docs")
PACKAGE = "fedpact"
LIMIT = 100
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (
    *FUNCTIONS,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
NAMING_CALLS = {
    "setattr",
    "getattr",
    "hasattr",
    "delattr",
    "object",
    "attrgetter",
    "methodcaller",
    "spy",
    "patch",
}


@dataclass
class Entry:
    kind: str
    module: str
    old: str
    new: str
    options: frozenset[str]
    line: int
    edits: int = 0

    def __str__(self):
        return f"names.tsv:{self.line}: {self.kind} {self.module} {self.old} -> {self.new}"


class Scope:
    """A scope and what it binds: name -> list of bindings (kind, node or target)."""

    def __init__(self, node, parent):
        self.node, self.parent = node, parent
        self.bound = defaultdict(list)
        self.globals = set()
        self.uses = []  # (ast node, name)

    @property
    def is_class(self):
        return isinstance(self.node, ast.ClassDef)

    def find(self, name):
        """The scope in which a name used here is bound, with the scopes passed on the way."""
        passed, scope, first = [], self, True
        while scope is not None:
            if name in scope.globals:
                while scope.parent is not None:
                    scope = scope.parent
                return scope, passed
            if (first or not scope.is_class) and name in scope.bound:
                return scope, passed
            if first or not scope.is_class:
                passed.append(scope)
            first = False
            scope = scope.parent
        return None, passed


class Collector(ast.NodeVisitor):
    """Builds the scopes of one module, and notes for each name the scope in which it is used."""

    def __init__(self, tree):
        self.top = self.scope = Scope(tree, None)
        self.scope_of = {}  # id(node) -> scope of use
        self.names, self.attributes, self.calls, self.strings = [], [], [], []
        self.functions, self.classes = [], []
        self.globals, self.imports, self.keywords = [], [], []
        self.fstrings, self.in_fstring = [], None
        self.docstrings = set()
        self.parent_class = {}
        self.visit(tree)

    def bind(self, name, kind, value, scope=None):
        scope = scope or self.scope
        if name in scope.globals:
            scope = self.top
        scope.bound[name].append((kind, value))

    def inside(self, node, parts):
        outer, self.scope = self.scope, Scope(node, self.scope)
        self.scope_of[id(node), "inner"] = self.scope
        for part in parts:
            if part is not None:
                self.visit(part)
        self.scope = outer

    def note_docstring(self, node):
        body = node.body
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            if isinstance(body[0].value.value, str):
                self.docstrings.add(id(body[0].value))

    def visit_Module(self, node):
        self.note_docstring(node)
        self.generic_visit(node)

    def function(self, node):
        self.bind(node.name, "def", node)
        self.functions.append((node, self.scope))
        self.note_docstring(node)
        for part in (
            *node.decorator_list,
            *node.args.defaults,
            *node.args.kw_defaults,
            node.returns,
        ):
            if part is not None:
                self.visit(part)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [a for a in (node.args.vararg, node.args.kwarg) if a]
        for arg in every:
            if arg.annotation is not None:
                self.visit(arg.annotation)
        outer, self.scope = self.scope, Scope(node, self.scope)
        self.scope_of[id(node), "inner"] = self.scope
        declare(self.scope, node)
        for arg in every:
            self.bind(arg.arg, "arg", arg)
        for part in node.body:
            self.visit(part)
        self.scope = outer

    visit_FunctionDef = visit_AsyncFunctionDef = function

    def visit_Lambda(self, node):
        for part in (*node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        outer, self.scope = self.scope, Scope(node, self.scope)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for arg in every + [a for a in (node.args.vararg, node.args.kwarg) if a]:
            self.bind(arg.arg, "arg", arg)
        self.visit(node.body)
        self.scope = outer

    def visit_ClassDef(self, node):
        self.bind(node.name, "def", node)
        self.classes.append((node, self.scope))
        self.note_docstring(node)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.inside(node, node.body)

    def comprehension(self, node):
        self.visit(node.generators[0].iter)
        outer, self.scope = self.scope, Scope(node, self.scope)
        for i, generator in enumerate(node.generators):
            self.visit(generator.target)
            if i:
                self.visit(generator.iter)
            for test in generator.ifs:
                self.visit(test)
        for part in ("elt", "key", "value"):
            if hasattr(node, part):
                self.visit(getattr(node, part))
        self.scope = outer

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension

    def visit_NamedExpr(self, node):
        self.visit(node.value)
        scope = self.scope
        while isinstance(scope.node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            scope = scope.parent
        outer, self.scope = self.scope, scope
        self.visit(node.target)
        self.scope = outer

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Store):
            self.bind(node.id, "name", node)
        self.names.append((node, self.scope, self.in_fstring))

    def visit_Attribute(self, node):
        self.attributes.append((node, self.scope, self.in_fstring))
        self.visit(node.value)

    def visit_Global(self, node):
        self.globals.append((node, self.scope))

    def visit_Import(self, node):
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            target = alias.name if alias.asname else alias.name.split(".")[0]
            self.bind(name, "module", target)
        self.imports.append((node, self.scope))

    def visit_ImportFrom(self, node):
        for alias in node.names:
            self.bind(alias.asname or alias.name, "from", (node.module or "", alias))
        self.imports.append((node, self.scope))

    def visit_ExceptHandler(self, node):
        if node.name:
            self.bind(node.name, "name", node)
        self.generic_visit(node)

    def visit_MatchAs(self, node):
        if node.name:
            self.bind(node.name, "name", node)
        self.generic_visit(node)

    def visit_MatchStar(self, node):
        if node.name:
            self.bind(node.name, "name", node)

    def visit_Call(self, node):
        self.calls.append((node, self.scope, self.in_fstring))
        self.generic_visit(node)

    def visit_JoinedStr(self, node):
        outer, self.in_fstring = self.in_fstring, self.in_fstring or node
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value)
        self.in_fstring = outer
        self.fstrings.append(node)

    def visit_Constant(self, node):
        if isinstance(node.value, str) and self.in_fstring is None:
            self.strings.append((node, self.scope))


def declare(scope, node):
    """Names that a function declares global or nonlocal."""
    for child in ast.walk(node):
        if isinstance(child, ast.Global):
            scope.globals.update(child.names)


@dataclass
class File:
    path: Path
    module: str
    text: str
    tree: ast.Module = None
    found: Collector = None
    edits: dict = field(default_factory=dict)  # (start, end) -> new

    def __post_init__(self):
        self.lines = self.text.split("\n")
        self.exported = {
            id(name)
            for node in (self.tree.body if self.tree else [])
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
            for name in ast.walk(node.value)
        }
        self.offsets = [0]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line) + 1)

    def at(self, line, column):
        """The offset in characters of ast's line and column, which counts bytes."""
        raw = self.lines[line - 1].encode()[:column]
        return self.offsets[line - 1] + len(raw.decode(errors="ignore"))

    def edit(self, start, end, new):
        self.edits[start, end] = new

    def result(self):
        text, last = self.text, len(self.text) + 1
        for (start, end), new in sorted(self.edits.items(), reverse=True):
            if end > last:
                raise SystemExit(
                    f"{self.path}: edits overlap at {self.text[start - 20 : end + 20]!r}"
                )
            text, last = text[:start] + new + text[end:], start
        return text


class Renamer:
    def __init__(self, root, mapping, lenient):
        self.root, self.mapping, self.lenient = root, mapping, lenient
        self.problems, self.notes, self.tests, self.texts = [], [], {}, []
        self.left = defaultdict(list)
        self.files, self.by_module, self.pages = [], {}, []
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*")):
                if "__pycache__" in path.parts or not path.is_file():
                    continue
                if path.suffix == ".py":
                    self.add(path)
                elif path.suffix in (".md", ".ipynb"):
                    self.pages.append(path)
        self.pages += sorted(root.glob("*.md"))
        self.classes = {}  # (module, qualified name) -> (file, node, scope)
        self.class_of_node = {}
        self.definers = defaultdict(set)  # attribute -> classes that define it
        for file in self.files:
            self.read_classes(file)
        self.uses = defaultdict(list)  # symbol -> [(file, start, end, scope, find-name or None)]
        self.symbols = {}
        self.resolve_all()

    def problem(self, text):
        self.problems.append(text)

    def add(self, path):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(self.root).with_suffix("").parts
        parts = parts[1:] if parts[0] == "src" else parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        file = File(path, module, text, ast.parse(text))
        file.found = Collector(file.tree)
        self.files.append(file)
        self.by_module[module] = file

    # ---------------------------------------------------------------- symbols

    def symbol(self, module, name, seen=()):
        """What `module.name` is: ("module", m) or ("name", m, n), or None."""
        whole = f"{module}.{name}"
        file = self.by_module.get(module)
        if file is not None and name in file.found.top.bound and (module, name) not in seen:
            return self.bound_symbol(file, file.found.top, name, (*seen, (module, name)))
        if whole in self.by_module or any(m.startswith(whole + ".") for m in self.by_module):
            return ("module", whole)
        return None

    def bound_symbol(self, file, scope, name, seen=()):
        for kind, value in scope.bound[name]:
            if kind == "module":
                if value.split(".")[0] == PACKAGE or value in self.by_module:
                    return ("module", value)
                return ("outside", value)
            if kind == "from":
                source, alias = value
                if source.split(".")[0] in (PACKAGE, "tests", "benchmarks", "experiments", ""):
                    found = self.symbol(source, alias.name, seen)
                    if found is not None:
                        return found
                elif source in self.by_module:
                    return self.symbol(source, alias.name, seen)
                return ("outside", f"{source}.{alias.name}")
        if scope.parent is None:
            return ("name", file.module, name)
        return None

    def value(self, file, scope, node):
        """The symbol that an expression of names and dots is, or None."""
        if isinstance(node, ast.Name):
            home, _ = scope.find(node.id)
            return None if home is None else self.bound_symbol(file, home, node.id)
        if isinstance(node, ast.Attribute):
            base = self.value(file, scope, node.value)
            if base and base[0] == "module":
                return self.symbol(base[1], node.attr)
            if base and base[0] == "outside":
                return ("outside", f"{base[1]}.{node.attr}")
        if isinstance(node, ast.Subscript):
            return self.value(file, scope, node.value)
        return None

    def read_classes(self, file):
        def visit(body, prefix, scope):
            for node in body:
                if isinstance(node, ast.ClassDef):
                    name = f"{prefix}{node.name}"
                    self.classes[file.module, name] = (file, node, scope)
                    self.class_of_node[id(node)] = (file.module, name)
                    inner = file.found.scope_of[id(node), "inner"]
                    self.read_members((file.module, name), node)
                    visit(node.body, f"{name}.", inner)
                elif isinstance(node, FUNCTIONS):
                    visit(
                        node.body, f"{prefix}{node.name}.", file.found.scope_of[id(node), "inner"]
                    )
                elif hasattr(node, "body"):
                    visit(node.body, prefix, scope)

        visit(file.tree.body, "", file.found.top)

    def read_members(self, key, node):
        for child in node.body:
            if isinstance(child, FUNCTIONS):
                self.definers[child.name].add(key)
                for inner in ast.walk(child):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        if isinstance(inner.value, ast.Name) and inner.value.id in ("self", "cls"):
                            self.definers[inner.attr].add(key)
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                self.definers[child.target.id].add(key)
            elif isinstance(child, ast.Assign):
                for target in child.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self.definers[name.id].add(key)

    def bases(self, key):
        file, node, scope = self.classes[key]
        for base in node.bases:
            found = self.value(file, scope, base)
            if found and found[0] == "name" and found[1:] in self.classes:
                yield found[1:]

    def family(self, key, attribute):
        """The classes that share an attribute with this one by inheritance."""
        parents = {k: set(self.bases(k)) for k in self.classes}
        family, waiting = {key}, [key]
        defining = self.definers[attribute]
        children = defaultdict(set)
        for child, above in parents.items():
            for parent in above:
                children[parent].add(child)
        while waiting:
            at = waiting.pop()
            ancestors, up = set(), [at]
            while up:
                for parent in parents[up.pop()]:
                    if parent not in ancestors:
                        ancestors.add(parent)
                        up.append(parent)
            below, down = set(), [at, *(a for a in ancestors if a in defining)]
            while down:
                for child in children[down.pop()]:
                    if child not in below:
                        below.add(child)
                        down.append(child)
            new = ({a for a in ancestors if a in defining} | below) - family
            family |= new
            waiting += [n for n in new if n in defining]
        return family

    def resolve_all(self):
        for file in self.files:
            found = file.found
            for node, scope, outer in found.names:
                home, passed = scope.find(node.id)
                if home is None:
                    continue
                symbol = self.bound_symbol(file, home, node.id)
                if symbol and symbol[0] == "name" and (symbol[2] == node.id):
                    span = self.span(file, node.lineno, node.col_offset, node.id, outer, False)
                    self.use(symbol, file, span, home, passed, scope)
            for node, scope, outer in found.attributes:
                base = self.value(file, scope, node.value)
                node.base = base
                if base and base[0] == "module":
                    symbol = self.symbol(base[1], node.attr)
                    if symbol and symbol[0] == "name":
                        self.use(
                            symbol, file, self.attribute_span(file, node, outer), None, [], None
                        )
            for node, scope in [*found.functions, *found.classes]:
                if scope.parent is None or node.name in scope.globals:
                    span = self.definition_span(file, node)
                    self.use(("name", file.module, node.name), file, span, found.top, [], scope)
            for node, _ in found.globals:
                for name in node.names:
                    for m in re.finditer(rf"\b{name}\b", file.lines[node.lineno - 1]):
                        at = file.offsets[node.lineno - 1] + m.start()
                        self.use(
                            ("name", file.module, name),
                            file,
                            [(at, at + len(name))],
                            found.top,
                            [],
                            found.top,
                        )
            for node, scope in found.imports:
                if isinstance(node, ast.Import):
                    continue
                for alias in node.names:
                    symbol = self.symbol(node.module or "", alias.name)
                    if symbol and symbol[0] == "name" and alias.name == symbol[2]:
                        start = file.at(alias.lineno, alias.col_offset)
                        end = start + len(alias.name)
                        home = None if alias.asname else scope
                        self.use(symbol, file, [(start, end)], home, [], scope)
            for node, scope in found.strings:
                self.read_string(file, node, scope)
            for node, scope, _ in found.calls:
                self.read_call(file, node, scope)

    def use(self, symbol, file, spans, home, passed, scope):
        for start, end in spans:
            self.uses[symbol].append((file, start, end, home, passed, scope))

    def span(self, file, line, column, name, outer, dotted):
        start = file.at(line, column)
        if file.text[start : start + len(name)] == name:
            return [(start, start + len(name))]
        if outer is None:
            raise SystemExit(f"{file.path}:{line}: expected {name} at column {column}")
        return self.in_fstring(file, outer, name, dotted)

    def in_fstring(self, file, outer, name, dotted):
        """Python 3.11 misplaces what stands in some f-strings: look for it between the braces."""
        start = file.at(outer.lineno, outer.col_offset)
        end = file.at(outer.end_lineno, outer.end_col_offset)
        spans, depth = [], 0
        before = r"(?<=\.)" if dotted else r"(?<![\w.])"
        text = file.text[start:end]
        levels = []
        for i, sign in enumerate(text):
            depth += sign == "{"
            depth -= sign == "}"
            levels.append(depth)
        for m in re.finditer(rf"{before}{name}\b", text):
            if levels[m.start()] % 2 or levels[m.start()] > 1:
                spans.append((start + m.start(), start + m.end()))
        return spans

    def attribute_span(self, file, node, outer):
        end = file.at(node.end_lineno, node.end_col_offset)
        start = end - len(node.attr)
        if file.text[start:end] == node.attr and file.text[start - 1 : start] in (".", " ", "\n"):
            return [(start, end)]
        if outer is None:
            raise SystemExit(f"{file.path}:{node.lineno}: expected .{node.attr}")
        return self.in_fstring(file, outer, node.attr, True)

    def definition_span(self, file, node):
        at = file.at(node.lineno, node.col_offset)
        m = re.compile(r"(?:async\s+)?(?:def|class)\s+").match(file.text, at)
        return [(m.end(), m.end() + len(node.name))]

    def read_string(self, file, node, scope):
        """Paths such as "fedpact.api.run" in strings, and whole annotations."""
        text, start = self.source(file, node)
        if id(node) in file.found.docstrings:
            return
        if id(node) in file.exported:
            symbol = self.symbol(file.module, node.value)
            if symbol and symbol[0] == "name" and symbol[2] == node.value:
                self.use(symbol, file, [(start + 1, start + 1 + len(node.value))], None, [], None)
            return
        for m in re.finditer(rf"{PACKAGE}(?:\.\w+)+(?:[:.]\w+)?", text):
            self.read_path(file, m[0], start + m.start())
        if re.fullmatch(r"[\"'][\w.]+[\"']", text):
            name = text[1:-1].split(".")[0]
            home, passed = scope.find(name)
            if home is not None and name.isidentifier() and name[0].isupper():
                symbol = self.bound_symbol(file, home, name)
                if symbol and symbol[0] == "name" and self.is_class(symbol):
                    self.use(symbol, file, [(start + 1, start + 1 + len(name))], None, [], None)

    def is_class(self, symbol):
        return symbol[1:] in self.classes

    def read_path(self, file, path, start):
        parts = re.split(r"[.:]", path)
        module = parts[0]
        position = len(parts[0])
        for part in parts[1:]:
            symbol = self.symbol(module, part)
            if symbol is None:
                return
            at = start + position + 1
            if symbol[0] == "name":
                self.use(symbol, file, [(at, at + len(part))], None, [], None)
                return
            if symbol[0] != "module":
                return
            module, position = symbol[1], position + 1 + len(part)

    def source(self, file, node):
        start = file.at(node.lineno, node.col_offset)
        return file.text[start : file.at(node.end_lineno, node.end_col_offset)], start

    def read_call(self, file, node, scope):
        """monkeypatch.setattr(module, "name", ...), getattr(thing, "name") and the like."""
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name == "TypeVar" and isinstance(node.args[0], ast.Constant):
            symbol = self.symbol(file.module, node.args[0].value)
            if symbol and symbol[0] == "name":
                start = self.source(file, node.args[0])[1] + 1
                span = (start, start + len(symbol[2]))
                self.use(symbol, file, [span], None, [], None)
            return
        if name not in NAMING_CALLS:
            return
        for i, arg in enumerate(node.args[:2]):
            if not (isinstance(arg, ast.Constant) and isinstance(arg.value, str)):
                continue
            text, start = self.source(file, arg)
            if not re.fullmatch(r"[\"'][\w]+[\"']", text):
                continue
            base = self.value(file, scope, node.args[0]) if i else None
            span = (start + 1, start + 1 + len(arg.value))
            if base and base[0] == "module":
                symbol = self.symbol(base[1], arg.value)
                if symbol and symbol[0] == "name":
                    self.use(symbol, file, [span], None, [], None)
            elif not (base and base[0] == "outside"):
                file.found.attributes.append((("string", arg.value, span), scope, None))

    # ---------------------------------------------------------------- finding entries

    def home(self, entry, name):
        """The module of an entry as it is now, or None with a problem."""
        if entry.module == "*":
            homes = [
                f.module
                for f in self.files
                if f.module.startswith(PACKAGE)
                and self.symbol(f.module, name) == ("name", f.module, name)
            ]
            if len(homes) == 1:
                return homes[0]
            self.problem(f"{entry}: {len(homes)} modules define {name}: expected one {homes}")
            return None
        for module in (self.mapping.get(entry.module), entry.module):
            if module in self.by_module and self.symbol(module, name) == ("name", module, name):
                return module
        self.problem(f"{entry}: no such name")
        return None

    def apply(self, entries):
        renamed = {}
        attributes, chosen = [], []
        for entry in entries:
            if not (entry.new.isidentifier() or entry.kind in ("module", "text", "keep")):
                self.problem(f"{entry}: {entry.new!r} is no identifier")
            elif entry.kind in ("class", "function", "global"):
                home = self.home(entry, entry.old)
                if home is not None:
                    if ("name", home, entry.old) in renamed:
                        self.problem(f"{entry}: renamed twice")
                    renamed["name", home, entry.old] = entry
            elif entry.kind in ("method", "attribute"):
                (chosen if receivers(entry) else attributes).append(entry)
        self.prose = []  # (entry, module, class or None)
        self.kept = {e.module for e in entries if e.kind == "keep"}
        for symbol, entry in renamed.items():
            self.apply_symbol(symbol, entry, renamed)
        self.apply_attributes(attributes)
        self.apply_by_receivers(chosen)
        for entry in entries:
            if entry.kind == "test":
                self.apply_test(entry)
            elif entry.kind == "parameter":
                self.apply_parameter(entry)
        for entry in entries:
            if entry.kind == "text":
                self.apply_text(entry)
        self.apply_strings(entries)
        self.apply_prose(renamed, attributes)

    def apply_symbol(self, symbol, entry, renamed):
        _, module, old = symbol
        new = entry.new
        if hasattr(builtins, new):
            self.problem(f"{entry}: {new} is a builtin")
            return
        top = self.by_module[module].found.top
        gone = {s[2] for s in renamed if s[1] == module}
        bad = []
        if new in top.bound and new not in gone:
            bad.append(f"{module} binds {new} already")
        for file, start, _end, home, passed, scope in self.uses[symbol]:
            line = file.text.count("\n", 0, start) + 1
            for other in passed:
                if new in other.bound or new in other.globals:
                    bad.append(f"{file.path.relative_to(self.root)}:{line} would be captured")
            if home is not None and home is not top and new in home.bound:
                if not self.leaves(file, home, new, renamed):
                    bad.append(f"{file.path.relative_to(self.root)}:{line} binds {new} already")
        if bad:
            self.problem(f"{entry}: " + "; ".join(sorted(set(bad))[:4]))
            return
        for file, start, end, *_ in self.uses[symbol]:
            if file.text[start:end] == old:
                file.edit(start, end, new)
                entry.edits += 1
        self.prose.append((entry, module, None))

    def leaves(self, file, scope, name, renamed):
        symbol = self.bound_symbol(file, scope, name)
        return symbol in renamed and all(
            kind == "from" and value[1].asname is None for kind, value in scope.bound[name]
        )

    def apply_attributes(self, entries):
        outside = outside_names()
        by_old = defaultdict(list)
        for entry in entries:
            by_old[entry.old.rpartition(".")[2]].append(entry)
        leaving = set(by_old)
        for old, group in by_old.items():
            news = {e.new for e in group}
            if len(news) > 1:
                self.problem(f"{group[0]}: {old} has several new names: {sorted(news)}")
                continue
            new, family, good = news.pop(), set(), True
            for entry in group:
                cls = entry.old.rpartition(".")[0]
                if cls == "*" or "all" in entry.options:
                    family |= self.definers[old]
                    if not self.definers[old]:
                        self.problem(f"{entry}: no class defines {old}")
                        good = False
                    continue
                keys = [
                    k
                    for k in self.classes
                    if k[1] == cls
                    and k in self.definers[old]
                    and (
                        entry.module == "*"
                        or k[0] in (entry.module, self.mapping.get(entry.module))
                    )
                ]
                if len(keys) != 1:
                    self.problem(f"{entry}: {len(keys)} classes {cls} define {old}")
                    good = False
                for key in keys:
                    family |= self.family(key, old)
            if not good:
                continue
            entry = group[0]
            others = self.definers[old] - family
            if others:
                names = ", ".join(sorted(f"{m}.{c}" for m, c in others)[:5])
                self.problem(f"{entry}: ambiguous, also defined by {names}")
                continue
            if old in outside and not any("force" in e.options for e in group):
                self.problem(f"{entry}: {old} is also an attribute of {outside[old]}")
                continue
            clash = self.definers[new] & family
            for key in self.definers[new] if new not in leaving else ():
                for at in family & self.definers[old]:
                    if at in self.ancestors(key) or key in self.ancestors(at):
                        clash = clash | {key}
            if clash and new not in leaving:
                self.problem(f"{entry}: {sorted(clash)[0]} has {new} already")
                continue
            shadow = [k for k in family & self.definers[old] if self.used_in_class(k, new)]
            if shadow:
                self.problem(f"{entry}: the body of {shadow[0]} uses {new}")
                continue
            for file in self.files:
                self.edit_attribute(file, old, new, family, entry)
            for e in group:
                self.prose.append((e, e.module, e.old.rpartition(".")[0]))

    def apply_by_receivers(self, entries):
        """Attributes that unrelated classes have, too: what `receivers` matches is this class's."""
        families = {}
        for entry in entries:
            cls, _, old = entry.old.rpartition(".")
            keys = [
                k
                for k in self.classes
                if k[1] == cls
                and k in self.definers[old]
                and (entry.module == "*" or k[0] in (entry.module, self.mapping.get(entry.module)))
            ]
            if len(keys) != 1:
                self.problem(f"{entry}: {len(keys)} classes {cls} define {old}")
                continue
            family = self.family(keys[0], old)
            families[entry.line] = family
            clash = [k for k in family if k in self.definers[entry.new]]
            if clash:
                self.problem(f"{entry}: {clash[0]} has {entry.new} already")
                del families[entry.line]
        for old in {e.old.rpartition(".")[2] for e in entries}:
            group = [e for e in entries if e.old.endswith(f".{old}") and e.line in families]
            for file in self.files:
                for entry in group:
                    self.edit_attribute(file, old, entry.new, families[entry.line], entry, True)
                self.edit_received(file, old, group, families)
        for entry in entries:
            if not entry.edits:
                self.problem(f"{entry}: nothing matched")
            self.prose.append((entry, entry.module, entry.old.rpartition(".")[0]))

    def edit_received(self, file, old, group, families):
        for node, scope, outer in file.found.attributes:
            if isinstance(node, tuple) or node.attr != old:
                continue
            if node.base and node.base[0] in ("module", "outside"):
                continue
            owner = scope
            while owner is not None and not owner.is_class:
                owner = owner.parent
            key = owner and self.class_of_node.get(id(owner.node))
            text = ast.unparse(node.value)
            if text in ("self", "cls", "super()"):
                fits = [e for e in group if key in families[e.line]]
            elif node.base and node.base[0] == "name":
                fits = [e for e in group if node.base[1:] in families[e.line]]
            else:
                fits = [e for e in group if re.fullmatch(receivers(e), text)]
            if len({e.new for e in fits}) > 1:
                self.problem(f"{fits[0]}: {text}.{old} is also another's")
            elif fits:
                for start, end in self.attribute_span(file, node, outer):
                    file.edit(start, end, fits[0].new)
                    fits[0].edits += 1
            elif text not in ("self", "cls"):
                self.left[f"{text}.{old}"].append(
                    f"{file.path.relative_to(self.root)}:{node.lineno}"
                )

    def ancestors(self, key):
        above, up = {key}, [key]
        while up:
            for parent in self.bases(up.pop()):
                if parent not in above:
                    above.add(parent)
                    up.append(parent)
        return above

    def used_in_class(self, key, name):
        file, node, _ = self.classes[key]
        scope = file.found.scope_of[id(node), "inner"]
        return any(
            s is scope and isinstance(n.ctx, ast.Load) and n.id == name
            for n, s, _ in file.found.names
        )

    def edit_attribute(self, file, old, new, family, entry, definitions_only=False):
        def put(spans):
            for start, end in spans:
                if file.text[start:end] == old:
                    file.edit(start, end, new)
                    entry.edits += 1

        for node, scope, outer in () if definitions_only else file.found.attributes:
            if isinstance(node, tuple):
                if node[1] == old:
                    put([node[2]])
            elif node.attr == old and not (node.base and node.base[0] in ("module", "outside")):
                put(self.attribute_span(file, node, outer))
        for key in family:
            owner, node, _ = self.classes[key]
            if owner is not file:
                continue
            inner = file.found.scope_of[id(node), "inner"]
            for child in node.body:
                if isinstance(child, FUNCTIONS) and child.name == old:
                    put(self.definition_span(file, child))
            for name, scope, outer in file.found.names:
                if name.id == old and scope.find(old)[0] is inner:
                    put(self.span(file, name.lineno, name.col_offset, old, outer, False))
        for node, scope, _ in file.found.calls:
            for keyword in node.keywords:
                if keyword.arg != old:
                    continue
                symbol = self.value(file, scope, node.func)
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if (symbol and symbol[1:] in family) or (
                    not definitions_only and name in ("replace", "_replace", "cls", "model_copy")
                ):
                    put(self.span(file, keyword.lineno, keyword.col_offset, old, None, False))
                elif not definitions_only:
                    self.notes.append(
                        f"{file.path.relative_to(self.root)}:{keyword.lineno} keyword {old}= "
                        f"of {ast.unparse(node.func)} left"
                    )

    def apply_test(self, entry):
        files = [f for f in self.files if f.path.relative_to(self.root).parts[0] == "tests"]
        has = [f for f in files if any(n.name == entry.old for n, _ in f.found.functions)]
        exact = [f for f in has if f.path.relative_to(self.root).as_posix() == entry.module]
        has = exact or has
        if len(has) != 1:
            self.problem(f"{entry}: {len(has)} files have this test")
            return
        file = has[0]
        if any(n.name == entry.new for n, _ in file.found.functions) and entry.new != entry.old:
            self.problem(f"{entry}: the file has {entry.new} already")
            return
        for node, scope in file.found.functions:
            if node.name == entry.old:
                for start, end in self.definition_span(file, node):
                    file.edit(start, end, entry.new)
                    entry.edits += 1
        self.tests[entry.old] = entry.new

    def apply_strings(self, entries):
        """Strings that are exactly an old name: replaced on demand, told of otherwise."""
        by_old = defaultdict(list)
        for entry in entries:
            if entry.kind not in ("test", "text", "module", "keep"):
                by_old[entry.old.rpartition(".")[2]].append(entry)
        left = defaultdict(list)
        for file in self.files:
            for node, _ in file.found.strings:
                if node.value not in by_old or id(node) in file.found.docstrings:
                    continue
                text, start = self.source(file, node)
                span = (start + 1, start + 1 + len(node.value))
                if span in file.edits or text[1:-1] != node.value:
                    continue
                group = [e for e in by_old[node.value] if "strings" in e.options]
                if group and file.path.relative_to(self.root).parts[0] != "src":
                    file.edit(*span, group[0].new)
                elif "_" in node.value.strip("_") or node.value[0].isupper():
                    where = f"{file.path.relative_to(self.root)}:{node.lineno}"
                    left[text].append(where)

        for text, places in sorted(left.items()):
            self.notes.append(f"string {text} left in {len(places)} places: {places[0]}")

    def apply_text(self, entry):
        paths = [
            p
            for p in [*(f.path for f in self.files), *self.pages]
            if p.relative_to(self.root).as_posix() == entry.module
        ]
        if not paths:
            self.problem(f"{entry}: no such file")
            return
        file = next((f for f in self.files if f.path == paths[0]), None)
        if file is None:
            self.texts.append((paths[0], entry))
            return
        for m in re.finditer(re.escape(entry.old), file.text):
            if (m.start(), m.end()) not in file.edits:
                file.edit(m.start(), m.end(), entry.new)
                entry.edits += 1
        if not entry.edits and "optional" not in entry.options:
            self.problem(f"{entry}: not found")

    def apply_parameter(self, entry):
        holder, _, old = entry.old.rpartition(".")
        count = 0
        for file in self.files:
            if file.module not in (entry.module, self.mapping.get(entry.module)):
                continue
            for node, scope in file.found.functions:
                name = node.name
                if scope.is_class:
                    name = f"{self.class_of_node[id(scope.node)][1]}.{name}"
                if name != holder:
                    continue
                inner = file.found.scope_of[id(node), "inner"]
                if entry.new in inner.bound:
                    self.problem(f"{entry}: {entry.new} is bound already")
                    return
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                for arg in every:
                    if arg.arg == old:
                        at = file.at(arg.lineno, arg.col_offset)
                        file.edit(at, at + len(old), entry.new)
                        count += 1
                for use, at_scope, outer in file.found.names:
                    home, passed = at_scope.find(old)
                    if use.id == old and home is inner:
                        if any(entry.new in s.bound for s in passed):
                            self.problem(f"{entry}: captured at line {use.lineno}")
                            return
                        for start, end in self.span(
                            file, use.lineno, use.col_offset, old, outer, False
                        ):
                            file.edit(start, end, entry.new)
                self.edit_keywords(file, node, scope, old, entry)
        entry.edits += count
        if not count:
            self.problem(f"{entry}: no such parameter")

    def edit_keywords(self, file, function, scope, old, entry):
        method = scope.is_class
        called = self.class_of_node[id(scope.node)][1] if function.name == "__init__" else None
        symbol = ("name", file.module, called or function.name)
        for other in self.files:
            for node, at, _ in other.found.calls:
                for keyword in node.keywords:
                    if keyword.arg != old:
                        continue
                    target = self.value(other, at, node.func)
                    if target == symbol or (
                        method
                        and not called
                        and getattr(node.func, "attr", "") == function.name
                        and not (target and target[0] in ("module", "outside", "name"))
                    ):
                        start = other.at(keyword.lineno, keyword.col_offset)
                        other.edit(start, start + len(old), entry.new)

    # ---------------------------------------------------------------- prose

    def apply_prose(self, renamed, attributes):
        """Mentions in docstrings, comments, pages, and source held in strings."""
        rules = []  # (old, new, qualifier or None, module, entry)
        defined = defaultdict(set)
        for file in self.files:
            for name in file.found.top.bound:
                if self.symbol(file.module, name) == ("name", file.module, name):
                    defined[name].add(file.module)
        for entry, module, cls in self.prose:
            if "private" in entry.options:
                continue
            old = entry.old.rpartition(".")[2]
            rules.append((old, entry.new, cls, module, entry, defined, len(self.definers[old])))
        if not rules and not self.tests:
            return
        self.rules = defaultdict(list)
        for rule in rules:
            self.rules[rule[0]].append(rule)
        names = "|".join(sorted(map(re.escape, {*self.rules, *self.tests}), key=len, reverse=True))
        self.word = re.compile(rf"(?<![\w-])({names})(?![\w-])")
        for file in self.files:
            for start, end, code in self.prose_of(file):
                if code and file.path.relative_to(self.root).as_posix() in self.kept:
                    continue
                self.edit_prose(file, start, end, code)
        self.page_edits = {}
        for path in self.pages:
            file = File(path, "", path.read_text(encoding="utf-8"))
            for start, end, code in page_parts(file.text, path.suffix):
                self.edit_prose(file, start, end, code)
            if file.edits:
                self.page_edits[path] = file.result()

    def prose_of(self, file):
        for node, _ in file.found.strings:
            start = file.at(node.lineno, node.col_offset)
            end = file.at(node.end_lineno, node.end_col_offset)
            if id(node) in file.found.docstrings:
                yield start, end, False
            elif file.module.startswith("tests") or "import" in node.value:
                if re.search(rf"import .*|from {PACKAGE}", node.value) and "\n" in node.value:
                    yield start, end, True
                elif "::test_" in node.value:
                    yield start, end, False
        # A string on its own behind an assignment documents it.
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if (
                    isinstance(node.value.value, str)
                    and id(node.value) not in file.found.docstrings
                ):
                    yield (
                        file.at(node.lineno, node.col_offset),
                        file.at(node.end_lineno, node.end_col_offset),
                        False,
                    )
        with tokenize.open(file.path) as stream:
            for token in tokenize.generate_tokens(stream.readline):
                if token.type == tokenize.COMMENT:
                    start = file.offsets[token.start[0] - 1] + token.start[1]
                    yield start, start + len(token.string), False

    def edit_prose(self, file, start, end, code):
        text = file.text[start:end]
        for m in self.word.finditer(text):
            old = m[1]
            if old in self.tests and old not in self.rules:
                new = self.tests[old]
            else:
                new = self.mention(file, text, start, m, code)
            if new is not None:
                at = start + m.start()
                if not any(s <= at < e for s, e in file.edits):
                    file.edit(at, at + len(old), new)

    def mention(self, file, text, start, m, code):
        old = m[1]
        before = text[: m.start()]
        ticked = before.count("`") % 2 == 1 and "\n\n" not in before[before.rfind("`") :]
        see = re.search(r"\b[Ss]ee $", before) is not None
        dotted = re.search(r"([\w.]+)\.$", before)
        called = text[m.end() : m.end() + 1] == "("
        doctest = re.match(r"\s*(>>>|\.\.\.) ", before[before.rfind("\n") + 1 :]) is not None
        member = re.match(r"\.[A-Za-z_]", text[m.end() :]) is not None
        if member and not old.lstrip("_")[0].isupper():
            return None
        looks = member or bool("_" in old.strip("_") or re.search(r"[a-z][A-Z]", old))
        keyword = re.search(r"[(,]\s*$", before) and re.match(r"\s*=(?!=)", text[m.end() :])
        if keyword and (code or doctest):
            return None
        candidates = []
        for _, new, cls, module, entry, defined, definers in self.rules[old]:
            if dotted:
                tail = dotted[1].split(".")[-1]
                if (cls is None and tail == module.split(".")[-1]) or (
                    cls is not None and (tail == cls.split(".")[-1] or tail == "self" or code)
                ):
                    candidates.append(new)
                continue
            here = file.module == module
            if cls is None:
                places = [file.module] if file.module else self.near(file, start + m.start())
                found = any(self.symbol(place, old) == ("name", module, old) for place in places)
                whole = text if file.module else file.text
                listed = re.search(
                    rf"from {re.escape(module)} import (\([^)]*\b{old}\b|[^\n(]*\b{old}\b)", whole
                )
                if code:
                    if listed or (found and not file.module):
                        candidates.append(new)
                    continue
                if doctest:
                    if found or listed:
                        candidates.append(new)
                    continue
                unique = len(defined[old]) == 1 and self.definers_free(old)
                if found or unique:
                    single = old[0].isupper() and not sentence_start(before)
                    if (
                        ticked
                        or see
                        or "prose" in entry.options
                        or (looks and (found or unique))
                        or (found and single)
                    ):
                        candidates.append(new)
            else:
                if code:
                    continue
                unique = definers >= 1 and not defined[old]
                if (here and (ticked or looks)) or (unique and (looks or (ticked and called))):
                    candidates.append(new)
        return candidates[0] if len(set(candidates)) == 1 else None

    def near(self, page, position):
        """The modules whose files a page names in the paragraph of a place, or above its code."""
        lines, at = page.text.split("\n"), page.text.count("\n", 0, position)
        named = paths(lines[at])
        for line in reversed(lines[max(0, at - 40) : at]):
            if named:
                break
            named = paths(line)
        return [m for m in (f"{PACKAGE}.{n}" for n in named) if m in self.by_module]

    def definers_free(self, name):
        return not self.definers.get(name)

    # ---------------------------------------------------------------- docstrings and writing

    def apply_docstrings(self, rows):
        for number, (module, qualified, old, new) in rows:
            file = self.by_module.get(self.mapping.get(module, module)) or self.by_module.get(
                module
            )
            node = file and find_definition(file.tree, qualified)
            if node is None:
                self.problem(f"docstrings.tsv:{number}: no {module} {qualified}")
                continue
            text = ast.get_docstring(node, clean=False)
            if text != old:
                placeholder = (text or "").startswith("See ") or len(text or "") < 12
                (self.problem if placeholder else self.notes.append)(
                    f"docstrings.tsv:{number}: {qualified} says {text!r}"
                )
                continue
            literal = node.body[0].value
            start = file.at(literal.lineno, literal.col_offset)
            end = file.at(literal.end_lineno, literal.end_col_offset)
            for span in [s for s in file.edits if start <= s[0] < end]:
                del file.edits[span]
            file.edit(start, end, f'"""{new}"""')

    def inherit_docstrings(self):
        """In place of "See Base.": the first sentence that the base says of this method."""
        for file in self.files:
            if not file.module.startswith(PACKAGE) or ".persample" in file.module:
                continue
            for node, scope in file.found.functions:
                head, gap, tail = (ast.get_docstring(node, clean=False) or "").partition("\n\n")
                text = " ".join(head.split())
                m = re.match(r"See (?:the class )?`?([\w.]+\w)`?\.(?:\s+(.*))?$", text)
                if m is None:
                    continue
                sentence = self.said_by(file, m[1], node.name, set())
                if sentence is None:
                    self.notes.append(f"{file.module}.{node.name} still says {text[:60]!r}")
                    continue
                literal = node.body[0].value
                start = file.at(literal.lineno, literal.col_offset)
                end = file.at(literal.end_lineno, literal.end_col_offset)
                for span in [s for s in file.edits if start <= s[0] < end]:
                    del file.edits[span]
                rest = f" {m[2]}" if m[2] else ""
                prefix = "r" if "\\" in sentence else ""
                file.edit(start, end, f'{prefix}"""{sentence}{rest}{gap}{tail}"""')
                self.inherited += 1

    inherited = 0

    def said_by(self, file, target, method, seen):
        """The first sentence of what a class, or a function, says of a method."""
        if (file.module, target) in seen:
            return None
        seen.add((file.module, target))
        name = target.split(".")[-1]
        found = self.symbol(file.module, target.split(".")[0])
        if found and found[0] == "module":
            found = self.symbol(found[1], name)
        if not found or found[0] != "name" or found[2] != name:
            homes = [k for k in self.classes if k[1] == name and k[0].startswith(PACKAGE)]
            if len(homes) != 1:
                return None
            found = ("name", *homes[0])
        other, node = self.by_module[found[1]], None
        if found[1:] in self.classes:
            for key in self.ancestors_in_order(found[1:]):
                owner, base, _ = self.classes[key]
                node = next((n for n in base.body if getattr(n, "name", "") == method), None)
                if node is not None:
                    other = owner
                    break
        text = node and ast.get_docstring(node)
        if not text:
            return None
        again = re.match(r"See ([\w.]+\w)", text)
        if again:
            return self.said_by(other, again[1], method, seen)
        paragraph = " ".join(text.split("\n\n")[0].split())
        return re.match(r".*?\.(?=\s+[A-Z]|$)|.*", paragraph)[0]

    def ancestors_in_order(self, key):
        yield key
        for base in self.bases(key):
            yield from self.ancestors_in_order(base)

    def write(self, dry):
        changed = 0
        for file in self.files:
            if file.edits:
                text = wrap(file.text, file.result())
                ast.parse(text)
                changed += 1
                if not dry:
                    file.path.write_text(text, encoding="utf-8")
        for path, text in getattr(self, "page_edits", {}).items():
            changed += 1
            if not dry:
                path.write_text(text, encoding="utf-8")
        return changed


def receivers(entry):
    """The expression of an option `receivers:EXPRESSION`, or None."""
    return next((o.partition(":")[2] for o in entry.options if o.startswith("receivers:")), None)


def paths(line):
    """The modules that a line names by their files: data/kinds.py is data.kinds."""
    found = re.findall(r"`(?:src/fedpact/)?((?:\w+/)*\w+)\.py`", line)
    return [name.removesuffix("/__init__").replace("/", ".") for name in found]


def sentence_start(before):
    return re.search(r"(^|[.:;!?]\s+|\"\"\"|#\s*|\n\s*\n\s*)$", before) is not None


def outside_names():
    """Attributes of what the code uses: name -> whose."""
    import pathlib
    import subprocess
    import threading

    things = [
        str,
        bytes,
        int,
        float,
        list,
        dict,
        set,
        tuple,
        pathlib.Path,
        re.Match,
        re.Pattern,
        subprocess.Popen,
        threading.Thread,
        threading.Event,
        Exception,
        type,
        object,
        argparse.Namespace,
        ast.AST,
    ]
    for name in ("torch", "numpy"):
        try:
            module = __import__(name)
        except ImportError:
            continue
        if name == "torch":
            things += [module.Tensor, module.nn.Module, module.optim.Optimizer, module.Generator]
        else:
            things += [module.ndarray, module.random.Generator]
    return {name: getattr(t, "__name__", str(t)) for t in things for name in dir(t)}


def find_definition(tree, qualified):
    node = tree
    for part in qualified.split(".") if qualified else ():
        node = next(
            (
                n
                for n in ast.walk(node)
                if isinstance(n, (*FUNCTIONS, ast.ClassDef)) and n.name == part
            ),
            None,
        )
        if node is None:
            return None
    return node


def page_parts(text, suffix):
    """What of a page may name code: (start, end, whether source)."""
    if suffix == ".ipynb":
        yield 0, len(text), True
        return
    at = 0
    for m in re.finditer(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield at, m.start(), False
        if m[1] in ("python", "py", "pycon"):
            yield m.start(2), m.end(2), True
        elif m[1] in ("", "bash", "sh", "console", "text"):
            yield m.start(2), m.end(2), False
        at = m.end()
    yield at, len(text), False


def wrap(before, after):
    """Break comment and docstring lines that have become longer than the limit."""
    if before == after:
        return after
    old = set(before.split("\n"))
    inside = docstring_lines(after)
    lines, waiting = [], list(enumerate(after.split("\n"), 1))
    changed = set()  # lines that took what was over of the line above
    while waiting:
        number, line = waiting.pop(0)
        while len(line) > LIMIT and (line not in old or number in changed):
            if (parts := split_literal(line)) is not None:
                lines.append(parts[0])
                line = parts[1]
                continue
            comment = re.match(r"\s*# ", line)
            if not comment and number not in inside:
                break
            indent = re.match(r"\s*(?:# )?", line)[0]
            example = re.match(r"\s*(>>>|\.\.\.) ", line)
            cut = line.rfind(" ", len(indent) + 1, LIMIT + 1)
            if example:  # it goes on behind a comma
                cut = line.rfind(", ", len(indent) + 5, LIMIT) + 1
                cut = cut if line.count("(", 0, cut) > line.count(")", 0, cut) else -1
                indent += "... "
            if cut < 0:
                break
            lines.append(line[:cut].rstrip())
            line = indent + line[cut + 1 :]
            behind = waiting[0][1] if waiting else ""
            prose = re.match(re.escape(indent) + r"[^\s>\"'|*.-]", behind)
            if not example and prose and (comment or waiting[0][0] in inside):
                number, behind = waiting.pop(0)
                line = f"{line} {behind[len(indent) :]}"
                changed.add(number)
        lines.append(line)
    return "\n".join(lines)


def split_literal(line):
    """Make two literals of a line that is one, where it has a space within the limit."""
    m = re.fullmatch(r'(\s+)(f?)"([^"\\]*)"(,?)', line)
    if m is None:
        return None
    indent, prefix, text, comma = m.groups()
    depth, cut = 0, None
    for i, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if sign == " " and not depth and len(indent) + len(prefix) + i + 3 <= LIMIT:
            cut = i + 1
    if cut is None or cut == len(text):
        return None
    return f'{indent}{prefix}"{text[:cut]}"', f'{indent}{prefix}"{text[cut:]}"{comma}'


def docstring_lines(text):
    inside = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                inside.update(range(node.lineno, node.end_lineno + 1))
    return inside


def read_table(path):
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            parts = line.rstrip().split("\t")
            if len(parts) not in (4, 5):
                raise SystemExit(f"{path}:{number}: {len(parts)} columns: expected 4 or 5")
            options = frozenset(parts[4].split(",")) if len(parts) == 5 else frozenset()
            entries.append(Entry(*parts[:4], options, number))
    return entries


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--names", type=Path, default=HERE / "names.tsv")
    parser.add_argument("--docstrings", type=Path, default=HERE / "docstrings.tsv")
    parser.add_argument("--mapping", type=Path, default=HERE / "mapping.json")
    parser.add_argument("--lenient", action="store_true", help="apply what has no problem")
    parser.add_argument("--dry", action="store_true", help="check and write nothing")
    parser.add_argument("--kinds", default="", help="only these kinds, separated by commas")
    args = parser.parse_args()
    mapping = json.loads(args.mapping.read_text()) if args.mapping.is_file() else {}
    entries = read_table(args.names)
    if args.kinds:
        entries = [e for e in entries if e.kind in args.kinds.split(",")]
    renamer = Renamer(args.checkout.resolve(), mapping, args.lenient)
    renamer.apply([e for e in entries if e.kind != "module"])
    if args.docstrings.is_file() and not args.kinds:
        rows = []
        for number, line in enumerate(args.docstrings.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                module, qualified, old, new = line.split("\t")
                old, new = (ast.literal_eval(f'"""{t}"""') for t in (old, new))
                rows.append((number, (module, qualified, old, new)))
        renamer.apply_docstrings(rows)
    if not args.kinds:
        renamer.inherit_docstrings()
        print(f"{renamer.inherited} docstrings taken from a base")
    for text, places in sorted(renamer.left.items()):
        print(f"note: {text} is taken for another's: {len(places)} places, {places[0]}")
    for note in sorted(set(renamer.notes)):
        print("note:", note)
    for problem in renamer.problems:
        print("PROBLEM:", problem)
    unused = [e for e in entries if not e.edits and e.kind not in ("module", "keep")]
    print(
        f"{len(entries)} entries, {len(entries) - len(unused)} applied, "
        f"{len(renamer.problems)} problems, {sum(e.edits for e in entries)} places"
    )
    if renamer.problems and not args.lenient:
        print("Nothing written: mend the table, or pass --lenient.")
        return 1
    print(f"{renamer.write(args.dry)} files {'would change' if args.dry else 'changed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
