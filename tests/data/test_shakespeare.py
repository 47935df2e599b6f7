"""Next characters, a site for each role, from a made-up text; the models that take them."""

import pytest
import torch

from fedpact.common.errors import DataError, ModelError
from fedpact.common.params import FlatModel
from fedpact.data import public
from fedpact.data.load import load_dataset
from fedpact.models.build import build
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate
from fedpact.simulation.workshop import TrainingSetup

SPEECHES = "ANN:\nTo be,\nor not.\n\nFirst Lord:\nAy: no.\n\nANN:\nThat is it.\n"


def made(pieces=6):
    """Two roles whose next character follows from the last one: letters in a circle."""
    circle = "abcdefgh" * 100
    return {
        name: circle[k : k + pieces * (public.LENGTH + 1)] for k, name in enumerate(("ANN", "BOB"))
    }


def test_a_role_says_all_its_speeches_one_after_another():
    assert public.roles(SPEECHES) == {
        "ANN": "To be,\nor not.\nThat is it.",
        "First Lord": "Ay: no.",
    }


def test_pieces_do_not_overlap_and_carry_their_next_character():
    data = public.of_roles(made() | {"MUTE": "ab"}, least=3)
    assert (data.x.shape, len(data.classes)) == ((12, 40), 65)
    assert data.site == ("ANN",) * 6 + ("BOB",) * 6
    whole = torch.cat([data.x[:6], data.y[:6, None]], 1).reshape(-1)
    assert "".join(public.CHARACTERS[k] for k in whole.tolist()) == made()["ANN"]
    with pytest.raises(DataError, match="no role has 100 pieces"):
        public.of_roles(made())


@pytest.mark.parametrize(
    "model",
    ["ngram", *(pytest.param(name, marks=pytest.mark.slow) for name in ("transformer", "lstm"))],
)
def test_the_models_are_independent_and_learn_privately(tmp_path, model):
    """What follows from the last character alone is learnt; the first guess is 1 of 65."""
    data = public.of_roles(made(12), least=3)
    plan = Plan.parse(
        {
            "model": model,
            "sites": 2,
            "rounds": 12,
            "sampling_rate": 1.0,
            "partition": {"kind": "natural"},
            "records": {"vocabulary": 65},
            "settings": {"learning_rate": 1.0},
            "server": {"optimiser": "momentum"},
            "privacy": {"epsilon": 1e3},
        }
    )
    kernel = TrainingSetup(plan, data.x[0], 65).bench(check=True).private
    assert kernel.way(data.x[:4], data.y[:4]) == "graph"
    assert simulate(plan, tmp_path / "run", data=data).summary["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("model", "size"), [("ngram", 12740), ("lstm", 26257), ("transformer", 14049)]
)
def test_their_sizes_are_the_given_ones(model, size):
    example = torch.zeros(40, dtype=torch.int64)
    assert FlatModel(build(model, example, 65, 0)).size == size
    with pytest.raises(ModelError, match=r"expected words, \(length,\)"):
        build(model, torch.zeros(1, 8, 8), 10, 0)


@pytest.mark.parametrize("model", ["ngram", "lstm", "transformer"])
def test_words_without_a_class_are_reported_before_dropping(model):
    plan = Plan.parse({"model": model, "records": {"vocabulary": 7}})
    with pytest.raises(ModelError, match=r"vocabulary = 7 and 6 classes"):
        TrainingSetup(plan, torch.zeros(5, dtype=torch.int64), 6).module()
    TrainingSetup(plan, torch.zeros(5, dtype=torch.int64), 7).module()


def test_logistic_on_last_characters_matches_its_formula():
    """Against its own formula: logits from three one-hot characters, the nearer ones longer."""
    model = build("ngram", torch.zeros(40, dtype=torch.int64), 5, 0)
    w, bias = (p.detach() for p in model.parameters())
    assert not w.any()
    assert not bias.any()
    x = torch.tensor([[0, 1, 2, 3, 4], [4, 4, 0, 0, 1]])
    with torch.no_grad():
        w.copy_(torch.randn(w.shape))
        bias.copy_(torch.randn(bias.shape))
    length = torch.tensor([0.49, 0.7, 1.0])
    length /= length.norm()
    for record, logits in zip(x.tolist(), model(x), strict=True):
        each = [
            length[place] * w[:, place * 5 + character]
            for place, character in enumerate(record[-3:])
        ]
        torch.testing.assert_close(logits, sum(each) + 0.3 * bias)
    # Of records that are shorter than that, all of it.
    assert FlatModel(build("ngram", torch.zeros(2, dtype=torch.int64), 5, 0)).size == 2 * 25 + 5


def test_the_published_text(real_data):
    data = load_dataset("shakespeare")
    assert len(set(data.site)) == 71
    assert data.x.shape == (20378, 40)
    text = (real_data / "shakespeare" / "input.txt").read_text()
    assert sorted(set(text)) == list(public.CHARACTERS)
