"""What tells one thing that was handed in from another: what decides what it does, and that alone.

Of each pair here the two do other things, so that their digests differ; and what is made once more,
or copied, does the same, and has the same one.
"""

import contextlib
import copy
import functools
import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedpact.common.user_code import digest_of_code

WEIGHTS = torch.tensor([1.0, 5.0])


class Act(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        return x * self.k


class Plain:
    def __init__(self, k):
        self.k = k

    def __call__(self, outputs, y):
        return self.k * outputs[:, 0]


def _with_global(value):
    """A function whose inner function alone refers to a global."""
    scope = {"HID": value}
    exec("def made():\n    return (lambda: HID)()", scope)
    return scope["made"]


def _with_call(body):
    scope = {"__name__": "own"}
    exec(f"class Own:\n    def __call__(self, o, y):\n        return {body}", scope)
    return scope["Own"]


def _layer(seed):
    torch.manual_seed(seed)
    return nn.Linear(2, 2)


def _capturing(value):
    return lambda: value


def _hooked(factor):
    layer = _layer(0)
    layer.register_forward_hook(lambda module, x, out: out * factor)
    return layer


def _frozen(frozen):
    return _layer(0).requires_grad_(not frozen)


def _buffered(value):
    layer = _layer(0)
    layer.register_buffer("own", torch.tensor(value), persistent=False)
    return layer


PAIRS = {
    "a tensor": lambda v: _capturing(WEIGHTS * v),
    "an array": lambda v: _capturing(np.array([1.0, v])),
    "a layer": lambda v: _capturing(_layer(v)),
    "an attribute": lambda v: nn.Sequential(nn.Linear(2, 2).requires_grad_(False), Act(v)),
    "an attribute's object": lambda v: Act(Plain(v)),
    "an inner function's global": _with_global,
    "what Python calls by itself": lambda v: _with_call(f"{v} * o"),
    "an object": Plain,
    "an object's method": lambda v: Plain(v).__call__,
    "part of a function": lambda v: functools.partial(torch.mul, v),
    "which of three is twice": lambda v: _capturing([1, 2, v]),
    "the parts of a list": lambda v: _capturing([[1], 2] if v == 1 else [[1, 2]]),
    "many values": lambda v: _capturing(dict.fromkeys("abcdefgh", 0) | {"f": v}),
    "a default": lambda v: eval(f"lambda x={v}: x"),
    "a property": lambda v: type("Own", (), {"p": property(_capturing(v))}),
    "a hook": _hooked,
    "which weights are learnt": lambda v: _frozen(v == 1),
    "a buffer that is not saved": _buffered,
}


@pytest.mark.parametrize("what", PAIRS)
def test_the_digest_changes_only_with_relevant_settings(what):
    def made(value):
        torch.manual_seed(0)
        return PAIRS[what](value)

    assert digest_of_code(made(1)) == digest_of_code(made(1)) != digest_of_code(made(2))
    assert digest_of_code(copy.deepcopy(made(1))) == digest_of_code(made(1))


@pytest.mark.slow
def test_another_process_finds_the_same():
    code = (
        "import torch, functools; from torch import nn; from fedpact.common.user_code import *\n"
        "torch.manual_seed(0); W = {'b', 'a', 'c'}\n"
        "class Net(nn.Module):\n"
        "    @property\n    def p(self): return W\n"
        "    @functools.lru_cache\n    def q(self): return torch.relu(self.p)\n"
        "net = Net(); net.l = [nn.Linear(2, 2)]; net.me = net.l\n"
        "print(digest_of_code(net), digest_of_code(Net))"
    )
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, {"__name__": "__main__"})
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert here.getvalue() == there.stdout != ""


def test_a_module_that_holds_itself_ends():
    module = Act(1.0)
    module.k = [module]
    assert digest_of_code(module) == digest_of_code(copy.deepcopy(module))
