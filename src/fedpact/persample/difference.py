"""A layer's calls at two points, as calls whose gradient is the difference of the two.

Every rule sums over calls and is linear in the output gradient g, so calls at the anchor with -g'
would do. But near the anchor the two terms cancel, and norms from Gram matrices would lose what is
left. Linear layers and convolutions are linear in their input u as well, therefore

    g uᵀ - g' u'ᵀ = (g - g') uᵀ + g' (u - u')ᵀ,

two terms as small as the difference itself; a bias has the first alone, with u = 1. The rules of
other layers instantiate what they sum, and take its norm from that.
"""

from typing import cast

from torch import Tensor, nn

from fedpact.params import at_hand
from fedpact.persample.layers import Rule
from fedpact.persample.norms import Part, together
from fedpact.persample.tape import Call

Both = tuple[list[Call], list[Call]]
"""A module's calls at w, and at the anchor."""

_BILINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d)


def held(call: Call, vector: Tensor) -> Call:
    """The call, with inputs of its own where they are views of `vector`, which will change."""
    weights = vector.untyped_storage().data_ptr()
    own = [
        t.detach().clone() if t.untyped_storage().data_ptr() == weights else t for t in call.tensors
    ]
    args, kwargs = call.rebuilt(own)
    return Call(args, kwargs, call.grad)


def difference(module: nn.Module, rule: Rule, names: frozenset[str], at: Both) -> Part:
    """The Part of g(w) - g(anchor) of a layer's named parameters, from its calls at both points."""
    calls, others = at
    alike = [a.input.shape == b.input.shape for a, b in zip(calls, others, strict=False)]
    if not (isinstance(module, _BILINEAR) and len(calls) == len(others) and all(alike)):
        return rule(module, calls + [_call(b.input, -_grad(b)) for b in others], names)
    pairs = list(zip(calls, others, strict=True))
    first = [_call(a.input, _grad(a) - _grad(b)) for a, b in pairs]
    # The first layer reads the records themselves, at both points the same.
    second = [_call(a.input - b.input, _grad(b)) for a, b in pairs if not _same(a, b)]
    if not second:
        return rule(module, first, names)
    weight, bias = names & {"weight"}, names & {"bias"}
    found = [rule(module, first + second, weight)] if weight else []
    return together([*found, rule(module, first, bias)] if bias else found)


def _same(a: Call, b: Call) -> bool:
    if a.input is b.input or a.input.data_ptr() == b.input.data_ptr():
        return True
    # On a card that would be to wait for it; a difference of 0 costs a product and changes nothing.
    return at_hand(a.input) and a.input.equal(b.input)


def _call(x: Tensor, grad: Tensor) -> Call:
    return Call((x.detach(),), {}, grad)


def _grad(call: Call) -> Tensor:
    return cast(Tensor, call.grad)
