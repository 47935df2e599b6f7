"""Lines of a forward pass that stand in the way, all of them at once, beside what layers do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedpact
from fedpact.common.errors import ModelError
from fedpact.models.build import build
from fedpact.models.prepare import find_in_pass, with_lines


class Net(nn.Module):
    """Does something to hidden numbers h [B, 4] of records x [B, 3]."""

    def __init__(self, act=lambda net, h: h):
        super().__init__()
        self.first, self.last, self.act = nn.Linear(3, 4), nn.Linear(4, 2), act
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.last(self.act(self, self.first(x)))


def keep(net, h):
    net.mean.mul_(0.9)
    return h - net.mean


def rounded(net, h):
    with torch.autocast("cpu", torch.bfloat16):
        return net.first(h[:, :3]).float()


SEEN = {
    "branch": (lambda net, h: h if h.sum() > 0 else -h, "a branch follows from values"),
    "any": (lambda net, h: h.relu() if (h > 3).any() else h, "a branch follows from values"),
    "weight": (lambda net, h: h if net.first.weight.norm() > 1 else -h, "a branch follows"),
    "item": (lambda net, h: h / h.abs().max().item(), "a number leaves its tensor"),
    "float": (lambda net, h: h * float(h[0, 0]), "a number leaves its tensor"),
    "numpy": (lambda net, h: h + h.detach().numpy().shape[0], "a number leaves its tensor"),
    "mean": (lambda net, h: h - h.mean(0), "records of a batch meet"),
    "sort": (lambda net, h: h.sort(0)[0], "records of a batch meet"),
    "product": (lambda net, h: (h @ h.t()).softmax(1) @ h, "records of a batch meet"),
    "order": (lambda net, h: h + h.flip(0), "records of a batch meet"),
    "state": (keep, "changes the model's own state"),
    "autocast": (rounded, "rounded by torch.autocast"),
}


@pytest.mark.parametrize("kind", SEEN)
def test_each_obstructing_line_is_named(kind):
    act, told = SEEN[kind]
    (found, *_) = [one for one in find_in_pass(Net(act), torch.zeros(3)) if told in one]
    assert "test_watched_pass.py, line" in found


def test_a_table_of_tokens_has_its_lines_too():
    class Words(Net):
        def forward(self, x):
            h = nn.functional.embedding(x, self.first.weight).mean(1)
            return h - h.mean(0)

    (found,) = find_in_pass(Words(), torch.zeros(5, dtype=torch.int64))
    assert "records of a batch meet" in found


ORDINARY = {
    "plain": lambda net, h: F.dropout(F.relu_(h), 0.5),
    "in place": lambda net, h: h.mul_(2).add_(1)[:, :4],
    "turned": lambda net, h: (h.t() * 2).t().flatten().view(-1, 4),
    "windows": lambda net, h: h.view(-1, 2, 2).softmax(2).flatten(1),
    "shape": lambda net, h: h if len(h) > 1 or h.shape[0] else -h,
    "mask": lambda net, h: torch.where(h > 0, h, 0.1 * h).cumsum(1),
}


@pytest.mark.parametrize("act", ORDINARY.values(), ids=ORDINARY)
def test_nothing_is_reported_for_independent_models(act):
    model = Net(act)
    before = {name: v.clone() for name, v in model.state_dict().items()}
    state = torch.get_rng_state()
    assert not list(find_in_pass(model, torch.zeros(3)))
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_positions_that_lead_are_not_taken_for_records():
    class Turned(Net):
        def forward(self, x):
            return super().forward((2 * x.transpose(0, 1)).mean(0))

    assert not list(find_in_pass(Turned(), torch.zeros(12, 3)))


class Obstructed(Net):
    """Three obstacles: a layer's, a branch and a mean."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        h = self.norm(self.first(x))
        if h.sum() > 0:
            h = 2 * h
        return self.last(h - h.mean(0))


def test_a_refusal_lists_layers_and_lines(monkeypatch):
    monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_: Obstructed)
    told = r"3 reasons(.|\n)*BatchNorm(.|\n)*if h.sum\(\) > 0(.|\n)*h - h.mean\(0\)"
    with pytest.raises(ModelError, match=told):
        build("own:net", torch.zeros(3), 2, 0)
    found = fedpact.prepare(Obstructed(), batch_norm="group", records=torch.zeros(2, 3))
    assert [one.partition(" (")[0] for one in found.left] == [
        "a branch follows from values", "records of a batch meet",
    ]  # fmt: skip


def test_refusals_of_the_kernel_list_every_line(tmp_path):
    def act(net, h):
        scale = h.abs().max().item()
        return h / scale if scale > 1 else h.sort(0)[0]

    data = torch.randn(20, 3), torch.arange(20) % 2
    with pytest.raises(ModelError, match=r"1\. a number leaves its tensor(.|\n)*max\(\)\.item"):
        fedpact.run(
            lambda: Net(act), data, sites=2, rounds=1, sampling_rate=0.5,
            privacy={"epsilon": 8.0}, out=tmp_path / "run",
        )  # fmt: skip


def test_a_model_that_writes_over_its_records_is_given_copies(monkeypatch):
    class Writing(Net):
        def forward(self, x):
            x[x < 0] = 0
            return super().forward(x)

    monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_: Writing)
    x = torch.randn(4, 3)
    given, model = x.clone(), build("own:net", torch.zeros(3), 2, 0)
    found = model(given)
    assert torch.equal(given, x)
    assert torch.equal(found, model.model(x.relu()))


def test_a_line_with_brackets_is_named_once():
    def act(net, h):
        return h * float(h.max().item())

    module = Net(act)
    seen = next(one for one in find_in_pass(module, torch.zeros(3)) if "item" in one)
    line = seen.partition("(")[2].rpartition("): ")[0]
    found = str(
        with_lines(ModelError(f"no way (a number in {line}), so not"), module, torch.zeros(3))
    )
    assert found.startswith("no way (a number), so not\n")
