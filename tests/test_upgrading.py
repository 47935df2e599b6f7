"""docs/notes/upgrading.md lists what is used inside torch and Flower, and all of it is there."""

import ast
import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from tests.test_architecture import parsed
from torch import nn
from torch.func import vmap

from fedpact.per_sample import products, rules
from fedpact.per_sample.tracing import batch_table, record_safety
from fedpact.per_sample.tracing.trace_context import for_vmap

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "notes" / "upgrading.md").read_text(encoding="utf-8")
ROWS = [line.split("|") for line in PAGE.splitlines() if line.startswith("| `")]
LISTED = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])]

PROMISED = ("flwr.app", "flwr.clientapp", "flwr.serverapp")
LIBRARIES = ("aten", "higher_order", "mkldnn")  # of operators, under torch.ops
WHERE = {
    **{name: getattr(torch.ops, name) for name in LIBRARIES},
    "Tensor": torch.zeros(1),
    "Module": nn.Linear(1, 1),
    "OpOverload": torch.ops.aten.add.Tensor,
}


def private(name):
    return name.startswith("_") and not name.startswith("__")


def root(node):
    """The name that an expression begins with, as `self` of self.a().b; "" of any other."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def used(tree, own):
    """Private and inner names of others in a file; of attributes and operators the last part.

    Python documents `os._exit`.
    """
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in ("torch", "flwr"):
                inner = module.startswith("flwr.") and module not in PROMISED
                inner = inner or "._" in module or module.startswith("torch.fx.passes")
                for alias in node.names:
                    if inner or private(alias.name):
                        yield f"{module}.{alias.name}"
            case ast.Attribute(value=of, attr=name):
                library = getattr(of, "attr", getattr(of, "id", "")).removeprefix("_")
                ours = name in own or root(of) in ("self", "cls", "os")
                if library in LIBRARIES or (private(name) and not ours and name != "_replace"):
                    yield name
            case ast.Constant(value=str(text)):
                parts = text.split(".")
                if re.fullmatch(r"/?(torch|flwr)(\.\w+)+.*", text) and " " not in text:
                    if private(parts[1]) or parts[0] == "/flwr":
                        yield text
                elif private(text) and any(hasattr(of, text) for of in WHERE.values()):
                    yield text


def defined(tree):
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def all_used():
    """Name -> the files that use it."""
    files = {path: parsed(path.read_text()) for path in (ROOT / "src").rglob("*.py")}
    own = {name for tree in files.values() for name in defined(tree)}
    found = {}
    for path, tree in files.items():
        for name in used(tree, own):
            found.setdefault(name, set()).add(path.relative_to(ROOT / "src/fedpact").as_posix())
    return found


def last(name):
    return name.rpartition(".")[2]


def test_inner_modules_in_use_are_listed_with_their_files():
    found = all_used()
    # A whole name stands there whole; of an attribute, the name or a step on the way to one.
    parts = {part for name in LISTED for part in name.split(".")[1:]}
    assert not {name: files for name, files in found.items() if name not in {*LISTED, *parts}}
    # An operator that gives nothing back is told by its name alone, and begins with no underscore.
    names = {last(name) for name in found} | {"sym_constrain_range_for_size"}
    assert not [name for name in LISTED if last(name) not in names]


def test_the_scan_finds_names_in_every_form():
    source = """
from torch.nn.modules.batchnorm import _BatchNorm
from flwr.common.serde import x
from flwr.app import Message
import logging
def _mine(t, self): ...
y = t._version, self._own, torch.ops.aten.lstm.input, _aten.gru.input, a._mine, has(t, "_schema")
log = "torch._dynamo", "/flwr.proto.A/B", "_mine", "a _word", "torch.fx"
"""
    tree = ast.parse(source)
    assert set(used(tree, set(defined(tree)))) == {
        *("torch.nn.modules.batchnorm._BatchNorm", "flwr.common.serde.x", "_version", "lstm"),
        *("gru", "_schema", "torch._dynamo", "/flwr.proto.A/B"),
    }


def test_all_are_there():
    for name in LISTED:
        if name.startswith("/"):
            continue
        first, *rest = name.split(".")
        if first in WHERE:
            found = WHERE[first]
        else:
            # The longest part of it that is a module, and attributes from there.
            found, rest = None, name.split(".")
            for end in range(len(rest), 0, -1):
                try:
                    found, rest = importlib.import_module(".".join(rest[:end])), rest[end:]
                    break
                except ImportError:
                    continue
        for part in rest:
            found = getattr(found, part)
        assert found is not None, name


def test_every_test_that_is_named_is_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 10
    for path, test in named:
        assert f"\ndef {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"
    for row in ROWS:
        assert re.search(r"::|the same|federation|Ray", row[-2]), row


def test_every_operator_of_a_table_is_one_of_torchs():
    for name in {*rules._RULES, *batch_table.RULES}:
        library, operator, overload = name.split(".")
        if library == "aten":
            assert hasattr(getattr(torch.ops.aten, operator), overload), name
    assert not [name for name in record_safety.CHECKED if not hasattr(torch.ops.aten, name)]


def test_layers_have_the_bases_that_they_are_known_by():
    bases = {
        "BatchNorm": nn.modules.batchnorm._BatchNorm,
        "InstanceNorm": nn.modules.instancenorm._InstanceNorm,
    }
    known = {n: k for n, k in vars(nn).items() if isinstance(k, type) and issubclass(k, nn.Module)}
    for word, base in bases.items():
        layers = [kind for name, kind in known.items() if word in name]
        assert len(layers) >= 4, word
        assert all(issubclass(kind, base) for kind in layers), word


def test_advice_on_slow_operations_can_be_switched_off():
    # torch.histc has no rule under vmap: torch goes through the records and says that it is slow.
    x = torch.rand(3, 5)

    def advice():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            vmap(lambda x: torch.histc(x, 4))(x)
        return [warning for warning in told if "performance drop" in str(warning.message)]

    assert advice()
    with for_vmap():
        assert not advice()
    assert advice()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_onednn_s_product_is_there_where_onednn_is():
    assert products._onednn() is not None
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    found = products._onednn()(x, weight, bias, "none", [], "")
    assert torch.allclose(found, torch.nn.functional.linear(x, weight, bias), atol=1e-5)
