"""Merge fedpact's modules by merge_map.py: python merge.py CHECKOUT [--per-sample].

Works from the checkout's present text. Imports, names that collide, strings that name modules,
paths in documents and the data files follow. See README.txt beside it.
"""

import argparse
import ast
import builtins
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for place in (HERE / "venv").glob("lib/python3*/site-packages"):
    sys.path.append(str(place))
sys.path.insert(0, str(HERE))
import libcst as cst  # noqa: E402
from libcst import metadata as md  # noqa: E402
import merge_map as M  # noqa: E402
import post  # noqa: E402

P = "fedpact"
BUILTINS = set(dir(builtins))
NOTES: list[str] = []


def note(text):
    NOTES.append(text)


def fail(text):
    sys.exit(f"merge.py: {text}")


# ------------------------------------------------------------------ the package as it is


def read(root: Path):
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Scoped:
    """One file with its scopes: bindings, their uses, and which names are builtins."""

    def __init__(self, name, source):
        self.name, self.source = name, source
        wrapper = md.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self.tree = wrapper.module
        scopes = wrapper.resolve(md.ScopeProvider)
        self.parent = wrapper.resolve(md.ParentNodeProvider)
        self.scope_of = scopes
        self.scopes = []
        for scope in scopes.values():
            if scope is not None and scope not in self.scopes:
                self.scopes.append(scope)
        self.globals = next(s for s in self.scopes if isinstance(s, md.GlobalScope))
        self.defs = {}  # name -> list of assignments that are no imports
        self.imports = {}  # name -> list of import assignments
        for a in self.globals.assignments:
            if isinstance(a, md.ImportAssignment):
                self.imports.setdefault(a.name, []).append(a)
            elif isinstance(a, md.Assignment):
                self.defs.setdefault(a.name, []).append(a)
        bound = set()
        for s in self.scopes:
            if not isinstance(s, md.BuiltinScope):
                bound |= {a.name for a in s.assignments if isinstance(a, md.Assignment)}
        self.all_bound = bound
        self.exported = set()  # what __all__ lists
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                self.exported = set(ast.literal_eval(node.value))
        self.builtins_used = set()
        for s in self.scopes:
            for access in s.accesses:
                if not isinstance(access.node, cst.Name):
                    continue
                name_ = access.node.value
                if name_ in BUILTINS and all(
                    isinstance(r, md.BuiltinAssignment) for r in access.referents
                ):
                    self.builtins_used.add(name_)

    def own_imports(self):
        """Every import assignment of our own modules, in any scope."""
        for s in self.scopes:
            if isinstance(s, md.BuiltinScope):
                continue
            for a in s.assignments:
                if isinstance(a, md.ImportAssignment):
                    yield s, a


def dotted(node):
    return cst.Module([]).code_for_node(node).strip()


def expr(text):
    return cst.parse_expression(text)


# ------------------------------------------------------------------ the map


def load_map(old):
    target, groups = {}, {}
    for line in M.MAP.strip().splitlines():
        if "<-" not in line:
            continue
        to, sources = line.split(" <- ")
        to = f"{P}.{to.strip()}"
        if to in groups:
            fail(f"the map has {to} twice")
        groups[to] = []
        for s in sources.split(","):
            s = f"{P}.{s.strip()}"
            key = s.removesuffix(".__init__")
            if key not in old:
                fail(f"the map names {s}, which is not there: change merge_map.py")
            if key in target:
                fail(f"the map names {s} twice")
            target[key] = to
            groups[to].append(key)
    gone = []
    for m, path in old.items():
        if m in target:
            continue
        rel = m.removeprefix(P).removeprefix(".")
        kept = m == P or rel in M.KEEP_MODULES
        kept = kept or any(rel == k or rel.startswith(f"{k}.") for k in M.KEEP)
        if kept:
            target[m] = m
            groups[m] = [m]
            continue
        if path.name == "__init__.py":
            tree = ast.parse(path.read_text("utf-8"))
            if len(tree.body) == 1 and ast.get_docstring(tree):
                if rel not in M.PACKAGES:
                    fail(f"package {m} has no new place in PACKAGES: change merge_map.py")
                gone.append(m)
                continue
        fail(f"{m} is in no row of the map: change merge_map.py")
    return target, groups, gone


def is_package(old, m):
    return old[m].name == "__init__.py"


# ------------------------------------------------------------------ names of merged files


class Merge:
    def __init__(self, root: Path):
        self.root = root
        self.src = root / "src" / P
        self.old = read(self.src)
        self.target, self.groups, self.gone = load_map(self.old)
        self.packages = {f"{P}.{k}": f"{P}.{v}" for k, v in M.PACKAGES.items()}
        self.text = {m: p.read_text("utf-8") for m, p in self.old.items()}
        self.scoped = {m: Scoped(m, t) for m, t in self.text.items()}
        self.new = {}  # (old module, global name) -> name in its new file
        self.dropped = set()  # (old module, name): a definition equal to another one's
        self.order = {n: self._ordered(n) for n in self.groups}
        for n in self.groups:
            self._name_definitions(n)

    def _ordered(self, n):
        group = self.groups[n]
        if len(group) == 1:
            return group
        graph = {}
        for m in group:
            graph[m] = set()
            for node in ast.walk(ast.parse(self.text[m])):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for a in node.names:
                        for x in (f"{node.module}.{a.name}", node.module):
                            if x in group and x != m:
                                graph[m].add(x)
        # Kahn's algorithm, in the map's order where it is free.
        done = []
        while len(done) < len(group):
            ready = [m for m in group if m not in done and graph[m] <= set(done)]
            if not ready:
                fail(f"the sources of {n} import each other in a circle")
            done.append(ready[0])
        return done

    def _constant(self, m, name):
        """The text of `name = ...` where two of them are one thing: a logger, a literal."""
        found = self.scoped[m].defs[name]
        if len(found) != 1:
            return None
        for node in ast.parse(self.text[m]).body:
            value = getattr(node, "value", None)
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if not isinstance(node, ast.Assign | ast.AnnAssign) or value is None:
                continue
            if len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == name:
                text = ast.unparse(value)
                if text.startswith("logging.getLogger(") or isinstance(value, ast.Constant):
                    return text
        return None

    def _name_definitions(self, n):
        group = self.order[n]
        taken = {}
        for m in group:
            s = self.scoped[m]
            for name in sorted(s.defs):
                others = [o for o in group if o != m]
                imported = any(
                    name in self.scoped[o].imports
                    and not self._is_from(o, name, m, name)
                    and name not in self.scoped[o].defs
                    for o in others
                )
                as_builtin = any(name in self.scoped[o].builtins_used for o in others)
                new = M.RENAMES.get((m.removeprefix(f"{P}."), name), name)
                if name in taken and new == name:
                    first = taken[name]
                    same = self._constant(m, name)
                    if same is not None and same == self._constant(first, name):
                        self.new[m, name] = self.new[first, name]
                        self.dropped.add((m, name))
                        continue
                    new = self._other(m, name, group)
                    note(f"{n}: {m}.{name} and {first}.{name} are two: the first is now {new}")
                elif (imported and name.startswith("_")) or as_builtin:
                    new = self._other(m, name, group)
                    note(f"{n}: {m}.{name} has the name of something else there: now {new}")
                taken.setdefault(name, m)
                taken.setdefault(new, m)
                self.new[m, name] = new

    def _is_from(self, o, name, m, symbol):
        """Whether o's global import `name` is m's `symbol`."""
        for a in self.scoped[o].imports[name]:
            found = self.resolve_import(a)
            if found == ("symbol", m, symbol):
                return True
        return False

    def _other(self, m, name, group):
        last = m.split(".")[-1].strip("_")
        if name.startswith("_"):
            new = f"_{last}{name}" if not name[1:2].isupper() else f"_{last.upper()}{name}"
            if re.match(r"_[A-Z][a-z]", name):
                new = f"_{last.capitalize().replace('_', '')}{name[1:]}"
        elif name.isupper():
            new = f"{last.upper()}_{name}"
        elif name[0].isupper():
            new = f"{last.capitalize().replace('_', '')}{name}"
        else:
            new = f"{last}_{name}"
        while any(new in self.scoped[o].all_bound for o in group):
            new += "_"
        return new

    # -------------------------------------------------------------- imports

    def import_parts(self, a):
        """(from module or None, name, local name, alias node) of an import assignment."""
        node = a.node
        if isinstance(node, cst.ImportFrom):
            if node.module is None or node.relative:
                return None
            module = dotted(node.module)
            for alias in node.names:
                local = alias.asname.name.value if alias.asname else alias.name.value
                if local == a.name:
                    return module, alias.name.value, local
        elif isinstance(node, cst.Import):
            for alias in node.names:
                full = dotted(alias.name)
                local = alias.asname.name.value if alias.asname else full
                if local == a.name or local.split(".")[0] == a.name:
                    return None, full, local
        return None

    def resolve_import(self, a):
        """("module", old module) or ("symbol", old module, name); None for what is not ours."""
        parts = self.import_parts(a)
        if parts is None:
            return None
        module, name, _ = parts
        return self.resolve(module, name)

    def resolve(self, module, name):
        if module is None:
            return ("module", name) if name in self.old else None
        if module != P and not module.startswith(f"{P}."):
            return None
        if f"{module}.{name}" in self.old:
            return ("module", f"{module}.{name}")
        if module in self.old:
            return self.home(module, name)
        return None

    def home(self, module, name):
        """The module that defines a name, followed through imports within one new file alone."""
        s = self.scoped[module]
        if name not in s.defs and name in s.imports:
            for a in s.imports[name]:
                found = self.resolve_import(a)
                if found and self.target_of(found[1]) == self.target.get(module):
                    return found
        return ("symbol", module, name)

    def target_of(self, module):
        if module in self.target:
            return self.target[module]
        if module in self.packages:
            return self.packages[module]
        fail(f"{module} has no new place")

    def new_name(self, module, name):
        """The name by which a module's global is met in its new file."""
        if (module, name) in self.new:
            return self.new[module, name]
        return name


# ------------------------------------------------------------------ rewriting one file


class Rewrite(cst.CSTTransformer):
    """Replace nodes by identity: expressions, and import statements by lists of statements."""

    def __init__(self, nodes, statements, removed):
        self.nodes, self.statements, self.removed = nodes, statements, removed

    def on_leave(self, original, updated):
        if id(original) in self.removed:
            return cst.RemoveFromParent()
        if id(original) in self.nodes:
            return self.nodes[id(original)](updated)
        return super().on_leave(original, updated)

    def leave_SimpleStatementLine(self, original, updated):
        found = []
        changed = False
        for a in original.body:
            if id(a) in self.statements:
                changed = True
                found += self.statements[id(a)]
        if not changed:
            return updated
        if len(original.body) != 1:
            fail("an import stands beside another statement on its line")
        if not found:
            return cst.RemoveFromParent()
        lines = []
        for k, text in enumerate(found):
            line = cst.parse_statement(text)
            if k == 0:
                line = line.with_changes(leading_lines=updated.leading_lines)
            if k == len(found) - 1:
                line = line.with_changes(trailing_whitespace=updated.trailing_whitespace)
            lines.append(line)
        return cst.FlattenSentinel(lines)


class File:
    """What becomes of one file's text: its imports, its uses of our names, its strings."""

    def __init__(self, merge, scoped, target, group=()):
        self.m, self.s, self.target, self.group = merge, scoped, target, group
        self.nodes, self.statements, self.removed = {}, {}, set()
        self.top = []  # import lines to hoist, for a merged file
        self.checked = []  # the same under TYPE_CHECKING

    def run(self, hoist=False, taken=None):
        """hoist: imports at the top are returned in self.top and not left in place."""
        s = self.s
        in_old = s.name in self.m.old
        if in_old:
            for name, assignments in s.defs.items():
                new = self.m.new_name(s.name, name)
                if new != name:
                    self._rename(assignments, name, new)
        done = set()
        plans = {}
        for scope, a in s.own_imports():
            statement = a.node
            plans.setdefault(id(statement), (statement, []))[1].append((scope, a))
        for statement, bindings in plans.values():
            self._import(statement, bindings, hoist, taken)
        del done
        self._globals()
        self._strings()
        transformer = Rewrite(self.nodes, self.statements, self.removed)
        return s.tree.visit(transformer)

    # ---- names

    def _rename(self, assignments, name, new):
        for a in assignments:
            self._rename_binding(a, name, new)
            for access in a.references:
                if isinstance(access.node, cst.Name) and access.node.value == name:
                    self._name_to(access.node, new, access)

    def _rename_binding(self, a, name, new):
        node = a.node
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self.nodes[id(node.name)] = lambda u: u.with_changes(value=new)
        elif isinstance(node, cst.Name):
            self.nodes[id(node)] = lambda u: u.with_changes(value=new)
        elif isinstance(node, cst.CSTNode):
            for child in ast_names(node, name):
                self.nodes[id(child)] = lambda u: u.with_changes(value=new)

    def _name_to(self, node, text, access=None, attribute=None):
        """Write `text` where a name stood; attribute: the node that is replaced with it."""
        first = text.split(".")[0]
        scope = access.scope if access is not None else None
        if scope is not None and self._shadowed(scope, first, node):
            raise Shadowed(first)
        at = attribute if attribute is not None else node
        parent = self.s.parent.get(at)
        self.nodes[id(at)] = lambda u: (
            expr(text)
            if "." in text
            else cst.Name(text, lpar=getattr(u, "lpar", ()), rpar=getattr(u, "rpar", ()))
        )
        del parent

    def _shadowed(self, scope, first, node):
        while not isinstance(scope, md.GlobalScope | md.BuiltinScope):
            # A class's own names are seen by its body alone.
            for a in scope.assignments:
                if isinstance(a, md.Assignment) and a.name == first:
                    return True
            scope = scope.parent
        return False

    def _globals(self):
        if self.s.name not in self.m.old:
            return
        for node in walk(self.s.tree):
            if isinstance(node, cst.Global):
                for item in node.names:
                    new = self.m.new_name(self.s.name, item.name.value)
                    if new != item.name.value:
                        self.nodes[id(item.name)] = lambda u, new=new: u.with_changes(value=new)

    # ---- imports

    def _import(self, statement, bindings, hoist, taken):
        found = {a.name: (scope, a) for scope, a in bindings}
        lines = []
        changed = False
        whole = isinstance(statement, cst.Import)
        at_top = isinstance(bindings[0][0], md.GlobalScope)
        if not whole and (isinstance(statement.names, cst.ImportStar)):
            fail(f"{self.s.name} imports *")
        for alias in statement.names:
            if whole:
                full = dotted(alias.name)
                local = alias.asname.name.value if alias.asname else full
                ours = full == P or full.startswith(f"{P}.")
                if not ours:
                    as_ = f" as {alias.asname.name.value}" if alias.asname else ""
                    entry = ("ext", f"import {full}{as_}", local.split(".")[0])
                    lines.append(entry)
                    continue
                if full == P:
                    lines.append(("ext", f"import {P}", P))
                    continue
                changed = True
                lines.append(self._import_whole(alias, full, local, found))
                continue
            if statement.relative:
                if self.s.name in self.m.old:
                    fail(f"{self.s.name} has a relative import")
                return
            module, name = dotted(statement.module), alias.name.value
            local = alias.asname.name.value if alias.asname else name
            kind = self.m.resolve(module, name)
            if kind is None and f"{module}.{name}" in self.m.packages:
                kind = ("module", f"{module}.{name}")
            if kind is None:
                as_ = f" as {local}" if local != name else ""
                lines.append(("ext", f"from {module} import {name}{as_}", local))
                if module == P or module.startswith(f"{P}."):
                    if module != P:
                        note(f"{self.s.name}: from {module} import {name} is left as it is")
                continue
            changed = True
            scope, a = found.get(local, (None, None))
            line = self._import_own(kind, name, local, scope, a, taken)
            if line and alias.asname and alias.asname.name.value == name and " as " not in line[1]:
                line = (line[0], f"{line[1]} as {name}", line[2])  # a name that is passed on
            if line:
                lines.append(line)
        if at_top and hoist:
            lines = self._aliased(lines, found, taken)
            line = self.s.parent[statement]
            if line.trailing_whitespace.comment:
                said = line.trailing_whitespace.comment.value
                lines = [(k, f"{text}  {said}", local) for k, text, local in lines]
            if any(each.comment for each in line.leading_lines):
                note(f"{self.s.name}: a comment above `{dotted(statement)}` is lost")
            checked = self._under_check(statement)
            (self.checked if checked else self.top).extend(lines)
            self.statements[id(statement)] = []
            return
        if changed:
            self.statements[id(statement)] = joined([text for _, text, _ in lines])
            if not lines and not at_top and self._alone(statement):
                self.statements[id(statement)] = ["pass"]

    def _alone(self, statement):
        line = self.s.parent[statement]
        block = self.s.parent[line]
        return len(block.body) == 1

    def _under_check(self, statement):
        node = statement
        while node in self.s.parent:
            node = self.s.parent[node]
            if isinstance(node, cst.If):
                if dotted(node.test) != "TYPE_CHECKING":
                    fail(f"{self.s.name} imports under `if {dotted(node.test)}`")
                return True
            if isinstance(node, cst.Try):
                fail(f"{self.s.name} imports under try: {dotted(statement)}")
        return False

    def _aliased(self, lines, found, taken):
        """Give an import another local name where the merged file has that name already."""
        out = []
        for key, text, local in lines:
            if local not in taken:
                taken[local] = text
            elif taken[local] != text:
                if taken[local] == "def" and key == "same":
                    continue
                module = re.match(r"(?:from (\S+) )?import (\S+)", text)
                last = (module[1] or module[2]).split(".")[-1]
                new = f"{last}_{local}" if module[1] else f"{local}_module"
                note(f"{self.target}: {local} of `{text}` is {new} here")
                scope, a = found[local]
                for access in a.references:
                    if id(access.node) not in self.nodes:
                        self._name_to(access.node, new, access)
                base = text.split(" as ")[0]
                text = f"{base} as {new}"
                taken[new] = text
            out.append((key, text, local))
        return out

    def _import_whole(self, alias, full, local, found):
        """`import fedpact.a.b`."""
        new = self.m.target_of(full)
        if alias.asname:
            return ("own", f"import {new} as {local}", local)
        scope, a = found.get(full) or next(iter(found.values()))
        for node in walk(self.s.tree):
            if isinstance(node, cst.Attribute) and dotted(node) == full:
                up = self.s.parent.get(node)
                if isinstance(up, cst.Attribute) and up.value is node:
                    attr = self.m.new_name(full, up.attr.value)
                    text = f"{new}.{attr}"
                    self.nodes[id(up)] = lambda u, text=text: expr(text)
                elif not isinstance(up, cst.ImportAlias):
                    self.nodes[id(node)] = lambda u, text=new: expr(text)
        return ("own", f"import {new}", P)

    def _import_own(self, kind, name, local, scope, a, taken):
        new = self.m.target_of(kind[1])
        references = list(a.references) if a is not None else []
        if kind[0] == "symbol":
            symbol = self.m.new_name(kind[1], kind[2])
            if new == self.target:
                if local != symbol:
                    for access in references:
                        self._bare(access, symbol)
                return None
            if local == name and symbol != name:
                # Follow the new name, if it is free here.
                if symbol in self.s.all_bound:
                    return ("own", f"from {new} import {symbol} as {local}", local)
                for access in references:
                    self._name_to(access.node, symbol, access)
                return ("own", f"from {new} import {symbol}", symbol)
            as_ = f" as {local}" if local != symbol else ""
            return ("own", f"from {new} import {symbol}{as_}", local)
        # A module as an object.
        old = kind[1]
        if new == self.target:
            for access in references:
                up = self.s.parent.get(access.node)
                if not (isinstance(up, cst.Attribute) and up.value is access.node):
                    fail(f"{self.s.name} uses its own module {local} as an object")
                self._bare_attribute(access, up, self._attribute(old, up.attr.value))
            return None
        package, _, last = new.rpartition(".")
        for access in references:
            up = self.s.parent.get(access.node)
            if isinstance(up, cst.Attribute) and up.value is access.node:
                attr = self._attribute(old, up.attr.value)
                if attr != up.attr.value:
                    self.nodes[id(up.attr)] = lambda u, attr=attr: u.with_changes(value=attr)
            self._patched(access.node, old)
        if local != name:  # it had an alias
            as_ = f" as {local}" if local != last else ""
            return ("own", f"from {package} import {last}{as_}", local)
        if last == local:
            return ("own", f"from {package} import {last}", local)
        if local in self.s.exported:
            return ("own", f"from {package} import {last} as {local}", local)
        group = self.group or [self.s.name]
        bound = set().union(
            *(self.m.scoped[g].all_bound if g in self.m.scoped else self.s.all_bound for g in group)
        )
        others = {b for b in bound if b == last}
        if others and not self._same_module_bound(last, new):
            return ("own", f"from {package} import {last} as {local}", local)
        for access in references:
            if id(access.node) in self.nodes:
                continue
            self._name_to(access.node, last, access)
        return ("own", f"from {package} import {last}", last)

    def _same_module_bound(self, last, new):
        """Whether all that binds the name `last` in this file are imports of that new module."""
        for g in self.group or [self.s.name]:
            s = self.m.scoped.get(g, self.s)
            for scope in s.scopes:
                if isinstance(scope, md.BuiltinScope):
                    continue
                for a in scope.assignments:
                    if a.name != last or not isinstance(a, md.Assignment):
                        continue
                    if not isinstance(a, md.ImportAssignment):
                        return False
                    found = self.m.resolve_import(a)
                    if not found or found[0] != "module" or self.m.target_of(found[1]) != new:
                        return False
        return True

    def _attribute(self, old, attr):
        if old not in self.m.old:
            return attr
        kind = self.m.home(old, attr)
        if kind[0] == "module":
            return attr
        return self.m.new_name(kind[1], kind[2])

    def _patched(self, node, old):
        """`setattr(module, "name", ...)`: the name follows."""
        arg = self.s.parent.get(node)
        call = self.s.parent.get(arg) if isinstance(arg, cst.Arg) else None
        if not isinstance(call, cst.Call) or not dotted(call.func).split(".")[-1] in (
            "setattr", "delattr", "getattr", "hasattr", "object",
        ):
            return
        if len(call.args) > 1 and isinstance(call.args[1].value, cst.SimpleString):
            text = call.args[1].value
            name = text.evaluated_value
            new = self._attribute(old, name)
            if new != name:
                self.nodes[id(text)] = lambda u: u.with_changes(value=f'"{new}"')

    def _bare(self, access, symbol):
        try:
            self._name_to(access.node, symbol, access)
        except Shadowed:
            self._free(access, symbol)
            self.nodes[id(access.node)] = lambda u: cst.Name(symbol, lpar=u.lpar, rpar=u.rpar)

    def _bare_attribute(self, access, up, symbol):
        try:
            self._name_to(access.node, symbol, access, attribute=up)
        except Shadowed:
            self._free(access, symbol)
            self.nodes[id(up)] = lambda u: cst.Name(symbol, lpar=u.lpar, rpar=u.rpar)

    def _free(self, access, symbol):
        """Rename the local variable that hides `symbol` where it is used."""
        scope = access.scope
        while not isinstance(scope, md.GlobalScope):
            mine = [a for a in scope.assignments if a.name == symbol]
            if mine:
                new = f"{symbol}_"
                while new in self.s.all_bound:
                    new += "_"
                for a in mine:
                    if isinstance(a.node, cst.Param):
                        self.nodes[id(a.node.name)] = lambda u: u.with_changes(value=new)
                        note(f"{self.s.name}: PARAMETER {symbol} is {new}: callers by name?")
                    self._rename([a], symbol, new)
                note(f"{self.s.name}: the local {symbol} is {new}, as the file has {symbol}")
            scope = scope.parent

    # ---- strings

    def _strings(self):
        for node in walk(self.s.tree):
            if isinstance(node, cst.SimpleString):
                if id(node) in self.nodes:
                    continue
                new = self.m.in_text(node.value, self.s.name)
                if '"""' in new:
                    new = self.m.pointers(new)
                if new != node.value:
                    self.nodes[id(node)] = lambda u, new=new: u.with_changes(value=new)
            elif isinstance(node, cst.FormattedStringText | cst.Comment):
                new = self.m.in_text(node.value, self.s.name)
                if isinstance(node, cst.Comment):
                    new = self.m.pointers(new)
                if new != node.value:
                    self.nodes[id(node)] = lambda u, new=new: u.with_changes(value=new)


class Shadowed(Exception):
    pass


def walk(node):
    yield node
    for child in node.children:
        yield from walk(child)


def ast_names(node, name):
    for child in walk(node):
        if isinstance(child, cst.Name) and child.value == name:
            yield child


def joined(lines):
    """Import lines with those of one module put together."""
    out, places = [], {}
    for text in dict.fromkeys(lines):
        found = re.match(r"from (\S+) import ([^#]*)$", text)
        if found and found[1] in places:
            out[places[found[1]]] += f", {found[2]}"
            continue
        if found:
            places[found[1]] = len(out)
        out.append(text)
    return out


# ------------------------------------------------------------------ text: strings and documents


def _in_text(self, text, name=""):
    """Old module names, paths and imports in a text, as they are now."""
    if P not in text and ".py" not in text and "." not in text:
        return text
    text = re.sub(r"from (fedpact(?:\.\w+)*) import (\(?)([\w, \n]+?)(\)?)(?=$|\n|;|\\n|\"|')",
                  self._import_text, text)
    text = re.sub(r"(?<![\w./\-])fedpact(?:\.\w+)+", self._dotted_text, text)
    return re.sub(r"(?<![\w.\-])(?:[\w.\-]+/)*\w+\.py\b", self._path_text, text)


def _import_text(self, found):
    module, names = found[1], [x.strip() for x in found[3].split(",") if x.strip()]
    lines = []
    for one in names:
        name, _, local = one.partition(" as ")
        kind = self.resolve(module, name)
        if kind is None and f"{module}.{name}" in self.packages:
            kind = ("module", f"{module}.{name}")
        if kind is None:
            lines.append(f"from {module} import {one}")
            continue
        new = self.target_of(kind[1])
        if kind[0] == "module":
            package, _, last = new.rpartition(".")
            local = local or (name if last != name else "")
            lines.append(f"from {package} import {last}" + (f" as {local}" if local else ""))
        else:
            symbol = self.new_name(kind[1], kind[2])
            local = local or (name if symbol != name else "")
            lines.append(f"from {new} import {symbol}" + (f" as {local}" if local else ""))
    lines = joined(lines)
    if len(lines) > 1 and found[2]:
        lines = [re.sub(r"import (.*)", r"import \1", x) for x in lines]
    elif found[2]:
        lines = [re.sub(r"import (.*)", r"import (\1)", lines[0])]
    start = found.string.rfind("\n", 0, found.start()) + 1
    lead = found.string[start : found.start()]
    glue = "\n" + lead if not lead.strip() or lead.strip() in (">>>", "...") else "; "
    return glue.join(lines)


def _dotted_text(self, found):
    return self.renamed(found[0])


def _renamed(self, text):
    parts = text.split(".")
    for k in range(len(parts), 1, -1):
        module = ".".join(parts[:k])
        rest = parts[k:]
        if module in self.target:
            if rest:
                rest[0] = File._attribute(_Only(self), module, rest[0])
            return ".".join([self.target[module], *rest])
        if module in self.packages:
            return ".".join([self.packages[module], *rest])
    return text


class _Only:
    def __init__(self, m):
        self.m = m


def _path_text(self, found):
    text = found[0]
    head = ""
    for prefix in ("src/fedpact/", "fedpact/"):
        if text.startswith(prefix):
            head, text = prefix, text.removeprefix(prefix)
    new = self.paths.get(text)
    if new is None or (not head and "/" not in text and text not in self.root_paths):
        return found[0]
    return head + new


def _pointers(self, text):
    """`module.Name` in a docstring or a comment, with or without packages before it."""
    return re.sub(r"(?<![\w./\-])[a-z_]+(?:\.[A-Za-z_]\w*)+(?![\w(/\-])", self._pointer, text)


def _pointer(self, found):
    text = found[0]
    parts = text.split(".")
    for k in range(len(parts), 0, -1):
        module = ".".join([P, *parts[:k]])
        rest = parts[k:]
        if module not in self.target or self.target[module] == module:
            continue
        s = self.scoped[module]
        if k == 1 and not rest or rest and rest[0] not in s.defs:
            continue
        new = self.renamed(".".join([module, *rest]))
        return new.removeprefix(f"{P}.")
    for k in range(len(parts) - 1, 1, -1):
        tail = "." + ".".join(parts[:k])
        homes = [m for m in self.target if m.endswith(tail) and parts[k] in self.scoped[m].defs]
        if len(homes) == 1:
            return self.renamed(".".join([homes[0], *parts[k:]])).removeprefix(f"{P}.")
    if len(parts) >= 2:
        homes = {
            (m, n.split(".")[-1], self.new_name(m, parts[1]))
            for m, n in self.target.items()
            if m.split(".")[-1] == parts[0] and parts[1] in self.scoped[m].defs
        }
        if len({h[1:] for h in homes}) == 1:
            _, last, name = homes.pop()
            return ".".join([last, name, *parts[2:]])
    return text


Merge.pointers, Merge._pointer = _pointers, _pointer
Merge.in_text, Merge._import_text, Merge._dotted_text = _in_text, _import_text, _dotted_text
Merge.renamed, Merge._path_text = _renamed, _path_text


# ------------------------------------------------------------------ putting it together


def file_of(module, packages):
    """The path under src of a new module."""
    rel = module.replace(".", "/")
    return f"{rel}/__init__.py" if module in packages else f"{rel}.py"


def summary_and_rest(doc):
    first, _, rest = doc.strip().partition("\n\n")
    return first, rest.strip()


def merged_docstring(m, n, group):
    rel = n.removeprefix(f"{P}.")
    first = M.DOCS.get(rel, "")
    if rel not in M.DOCS:
        fail(f"{n} is made of {len(group)} modules and has no line in DOCS: change merge_map.py")
    parts = []
    for one in group:
        doc = ast.get_docstring(ast.parse(m.text[one])) or ""
        s, rest = summary_and_rest(doc)
        if first is None:
            first = s
        if rest:
            parts.append(rest)
    return m.pointers(m.in_text("\n\n".join([first, *parts])))


def body_text(module_node):
    """The code of a module without its docstring."""
    body = list(module_node.body)
    head = []
    if body and isinstance(body[0], cst.SimpleStatementLine):
        first = body[0].body[0]
        if isinstance(first, cst.Expr) and isinstance(
            first.value, cst.SimpleString | cst.ConcatenatedString
        ):
            body = body[1:]
    # Comments that stood above the first statement.
    head = "".join(line.comment.value + "\n" for line in module_node.header if line.comment)
    return head + cst.Module(body).code.strip("\n") + "\n"


def wrapped(text):
    """A docstring's text in quotes, its first line shortened to fit."""
    out = []
    for k, line in enumerate(text.splitlines()):
        if len(line) + (3 if k == 0 else 0) > 100 and not line.startswith((" ", ">>>", "|")):
            words, now = line.split(" "), ""
            for w in words:
                limit = 97 if not out else 100
                if now and len(now) + 1 + len(w) > limit:
                    out.append(now)
                    now = w
                else:
                    now = f"{now} {w}" if now else w
            out.append(now)
        else:
            out.append(line)
    body = "\n".join(out)
    raw = "r" if "\\" in body else ""
    return f'{raw}"""{body}"""\n' if len(out) == 1 else f'{raw}"""{body}\n"""\n'


def write_merged(m, n):
    group = m.order[n]
    taken = {}
    for one in group:
        for name in m.scoped[one].defs:
            taken[m.new_name(one, name)] = "def"
    bodies, top, checked = [], [], []
    for one in group:
        f = File(m, m.scoped[one], n, group)
        tree = f.run(hoist=True, taken=taken)
        top += f.top
        checked += f.checked
        tree = tree.visit(DropEmptyChecks(m, one))
        bodies.append(body_text(tree))
    lines = joined([text for _, text, _ in top])
    eager = set(dict.fromkeys(text for _, text, _ in top))
    lazily = joined([text for _, text, _ in checked if text not in eager])
    text = wrapped(merged_docstring(m, n, group)) + "\n" + "\n".join(lines) + "\n"
    if lazily:
        text += "\nif TYPE_CHECKING:\n" + "".join(f"    {x}\n" for x in lazily)
    return text + "\n\n" + "\n\n".join(bodies)


class DropEmptyChecks(cst.CSTTransformer):
    """Definitions that another source has as well, and `if TYPE_CHECKING:` blocks left empty."""

    def __init__(self, m, one):
        self.dropped = {m.new[o, name] for o, name in m.dropped if o == one}
        self.depth = 0

    def visit_FunctionDef(self, node):
        self.depth += 1

    def leave_FunctionDef(self, original, updated):
        self.depth -= 1
        return updated

    visit_ClassDef, leave_ClassDef = visit_FunctionDef, leave_FunctionDef

    def leave_If(self, original, updated):
        if dotted(original.test) == "TYPE_CHECKING" and not updated.body.body:
            return cst.RemoveFromParent()
        return updated

    def leave_SimpleStatementLine(self, original, updated):
        if self.depth or len(updated.body) != 1:
            return updated
        node = updated.body[0]
        target = None
        if isinstance(node, cst.Assign) and len(node.targets) == 1:
            target = node.targets[0].target
        elif isinstance(node, cst.AnnAssign):
            target = node.target
        if isinstance(target, cst.Name) and target.value in self.dropped:
            return cst.RemoveFromParent()
        return updated


def new_depth(m, one, text):
    """`Path(__file__).parents[k]` follows the file's new depth."""
    if m.old[one].name == "__init__.py":
        before = one.count(".") + 1
    else:
        before = one.count(".")
    after = m.target[one].count(".")
    if m.target[one] == one:
        return text
    return re.sub(
        r"Path\(__file__\)\.parents\[(\d+)\]",
        lambda f: f"Path(__file__).parents[{int(f[1]) + after - before}]",
        text,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--per-sample", action="store_true")
    args = parser.parse_args()
    root = args.checkout.resolve()
    post.before(root)
    m = Merge(root)
    new_packages = {P}
    for n in m.groups:
        parts = n.split(".")
        new_packages |= {".".join(parts[:k]) for k in range(1, len(parts))}
    new_packages |= {n for n in m.groups if n in m.old and is_package(m.old, n)}
    m.paths = {}
    for one, n in m.target.items():
        m.paths[m.old[one].relative_to(m.src).as_posix()] = file_of(n, new_packages).removeprefix(
            f"{P}/"
        )
    m.root_paths = {p for p in m.paths if "/" not in p}
    for one in m.old:
        m.text[one] = new_depth(m, one, m.text[one]) if one in m.target else m.text[one]
        if "Path(__file__).parents" in m.text[one] and one in m.target:
            m.scoped[one] = Scoped(one, m.text[one])
    written = {}
    for n, group in m.groups.items():
        if len(group) == 1:
            one = group[0]
            tree = File(m, m.scoped[one], n, group).run()
            written[n] = tree.code
        else:
            written[n] = write_merged(m, n)
    for p in sorted(new_packages):
        rel = p.removeprefix(f"{P}.")
        if p in written:
            continue
        if rel not in M.PACKAGE_DOCS and p not in m.old:
            fail(f"package {p} has no docstring in PACKAGE_DOCS")
        doc = M.PACKAGE_DOCS.get(rel)
        if doc is None:
            source = m.text[f"{P}.{M.OLD_PACKAGE_DOCS.get(rel, rel)}"]
            doc = m.in_text(ast.get_docstring(ast.parse(source)))
        written[p] = wrapped(doc)
    # Other Python files, and documents.
    others = []
    for folder in ("tests", "benchmarks", "experiments", "docs"):
        others += sorted((root / folder).rglob("*.py"))
    rewritten = {}
    for path in others:
        if path.name in post.BY_HAND:
            continue
        text = path.read_text("utf-8")
        if P not in text and not re.search(r"\w\.py\b", text):
            continue
        s = Scoped(f"#{path.relative_to(root)}", text)
        rewritten[path] = File(m, s, "").run().code
    documents = {}
    for pattern in ("*.md", "*.yml", "*.cff", "Makefile", "docs/*.md", "docs/notebooks/*.ipynb",
                    "experiments/**/*.md", "benchmarks/**/*.md", "docs/**/*.css", "src/**/*.j2"):
        for path in root.glob(pattern):
            text = path.read_text("utf-8")
            new = m.in_text(text)
            if new != text:
                documents[path] = new
    # Data files.
    moves = {}
    for path in sorted(m.src.rglob("*")):
        if path.is_dir() or path.suffix in (".py", ".pyc"):
            continue
        rel = path.relative_to(m.src).as_posix()
        for old, new in M.RESOURCES.items():
            if rel == old:
                moves[path] = m.src / new
            elif old.endswith("/") and rel.startswith(old):
                moves[path] = m.src / (new + rel.removeprefix(old))
    for path, new in moves.items():
        new.parent.mkdir(parents=True, exist_ok=True)
        path.rename(new)
    for path in m.old.values():
        path.unlink()
    for n, text in written.items():
        path = root / "src" / file_of(n, new_packages)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    for path, text in {**rewritten, **documents}.items():
        path.write_text(text, "utf-8")
    for folder in sorted(m.src.rglob("*"), reverse=True):
        if folder.is_dir() and not any(
            p.name != "__pycache__" and p.suffix != ".pyc" for p in folder.rglob("*")
        ):
            subprocess.run(["rm", "-rf", str(folder)], check=True)
    mapping = {o: n for o, n in sorted(m.target.items())}
    mapping.update({o: m.packages[o] for o in m.gone})
    (HERE / "mapping.json").write_text(json.dumps(mapping, indent=1, sort_keys=True) + "\n")
    names = {f"{a}.{b}": f"{m.target[a]}.{c}" for (a, b), c in sorted(m.new.items()) if b != c}
    (HERE / "renamed.json").write_text(json.dumps(names, indent=1) + "\n")
    post.after(root, args.per_sample)
    (HERE / "notes.txt").write_text("\n".join(dict.fromkeys(NOTES)) + "\n")
    print(f"{len(m.old)} modules -> {len(written)} files; {len(NOTES)} notes in notes.txt")


if __name__ == "__main__":
    main()
