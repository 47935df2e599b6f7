"""A run that begins with given weights: those, to the last bit, at every party; and what is said.

References: the model of the earlier run, read from its file by safetensors alone.
"""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedpact
from fedpact.common.errors import ModelError, PlanError
from fedpact.models.initial import InitialSettings
from fedpact.plan import Plan
from fedpact.simulation.setup import SimulationSetup

SMALL = {"rounds": 1, "sites": 2, "privacy": {"accountant": "rdp"}}
PLAIN = {"rounds": 1, "sites": 2, "privacy": {"mode": "none"}}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The folder of a private run that has ended."""
    folder = tmp_path_factory.mktemp("before") / "first"
    fedpact.run(Plan.parse(SMALL), folder)
    return folder


def same(module, path):
    expected, found = load_file(path), module.state_dict()
    alike = [torch.equal(found[name], expected[name]) for name in found]
    return found.keys() == expected.keys() and all(alike)


def test_a_run_begins_where_the_other_ended_and_says_so(before, tmp_path):
    plan = Plan.parse({**SMALL, "initial": str(before)})
    block = (before / "model.safetensors").read_bytes()
    assert plan.initial.sha256 == hashlib.sha256(block).hexdigest()
    assert same(SimulationSetup.of(plan).workshop.module(), before / "model.safetensors")
    result = fedpact.run(plan, tmp_path / "second")
    ended = json.loads((before / "summary.json").read_text())
    assert result.records[0].accuracy == ended["accuracy"]
    said = json.loads((tmp_path / "second" / "privacy.json").read_text())
    spent = max(ended["epsilon"].values())
    assert f"ε <= {spent!r}" in said["initial"]
    assert any("first weights" in line for line in said["does_not_cover"])
    # It goes on where it ended: plan.json holds the digest, and is the same plan.
    assert Plan.parse(json.loads((tmp_path / "second" / "plan.json").read_text())) == plan


def test_a_path_and_a_result_are_as_good_as_the_folders_name(before):
    named = Plan.parse({**SMALL, "initial": str(before)})
    for given in (before, fedpact.load(before), {"weights": before}):
        assert Plan(**{**SMALL, "initial": given}) == named
    with pytest.raises(
        PlanError, match="initial: 3: expected a run's folder, a file of weights, or"
    ):
        Plan(**{**SMALL, "initial": 3})


def test_private_plan_needs_a_statement_on_initial_weights(before, tmp_path):
    file = before / "model.safetensors"
    other = tmp_path / "model.safetensors"
    other.write_bytes(file.read_bytes())
    with pytest.raises(PlanError, match=r"initial\.trained_on"):
        Plan.parse({**SMALL, "initial": str(other)})
    plain = Plan.parse({**PLAIN, "initial": str(other)})
    assert plain.initial.trained_on is None
    # A plain run's folder says nothing that could stand for its records.
    folder = tmp_path / "plain"
    fedpact.run(Plan.parse(PLAIN), folder)
    with pytest.raises(PlanError, match=r"initial\.trained_on"):
        Plan.parse({**SMALL, "initial": str(folder)})
    said = {"weights": str(other), "trained_on": "public digits"}
    assert Plan.parse({**SMALL, "initial": said}).initial.describe().endswith("public digits.")


def test_own_words_complement_what_a_run_states(tmp_path):
    folder, plain = tmp_path / "run", tmp_path / "plain"
    fedpact.run(Plan.parse(SMALL), folder)
    fedpact.run(Plan.parse(PLAIN), plain)
    # Without privacy no more of a run has to be there.
    (plain / "privacy.json").unlink()
    for weights, known in ((folder, "private run run, which spent"), (plain, "had no privacy")):
        said = {"weights": str(weights), "trained_on": "public"}
        plan = Plan.parse({**SMALL, "initial": said})
        assert known in plan.initial.describe()
        assert plan.initial.describe().endswith("said of it: public.")
        # A plan that was written says the same when it is read again.
        assert Plan.parse(json.loads(plan.model_dump_json())) == plan
    # Of a file of somebody else's that lies there, as in a party's directory, it says nothing.
    tensors = {name: value + 1 for name, value in load_file(plain / "model.safetensors").items()}
    save_file(tensors, plain / "other.safetensors")
    said = {"weights": str(plain / "other.safetensors"), "trained_on": "public"}
    assert Plan.parse({**SMALL, "initial": said}).initial.trained_on == "public"


def test_weights_state_what_evaluations_of_their_run_cost(tmp_path):
    """A model may be the one at which released evaluations ended its run."""
    held = {"share": 0.2, "epsilon": 9.0, "delta": 2e-5}
    run = fedpact.run(Plan.parse({**SMALL, "evaluation": held}), tmp_path / "run")
    spent = max(run.summary["evaluation"]["epsilon_spent"].values())
    assert spent > max(run.summary["epsilon"].values())
    told = Plan.parse({**SMALL, "initial": str(tmp_path / "run")}).initial.trained_on
    assert f"which spent ε <= {spent!r} at δ = 2e-05" in told


def test_run_vouches_only_for_the_weights_it_wrote(tmp_path):
    folder = tmp_path / "run"
    fedpact.run(Plan.parse({**SMALL, "server": {"average": "exponential"}}), folder)
    for name in ("model", "average"):
        path = folder / f"{name}.safetensors"
        assert "private run" in Plan.parse({**SMALL, "initial": str(path)}).initial.trained_on
    # A file of somebody else's that came to lie there, or in the model's place.
    tensors = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    for name in ("other", "model"):
        save_file(tensors, folder / f"{name}.safetensors")
        told = f"{name}.safetensors is none of the weights that the run in .* wrote: say what"
        with pytest.raises(PlanError, match=told):
            Plan.parse({**SMALL, "initial": str(folder / f"{name}.safetensors")})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: tensors.popitem(), "missing, expected"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "expected none"),
        (lambda tensors: next(iter(tensors.values())).fill_(torch.nan), "NaN or infinity"),
        (
            lambda tensors: tensors.update({n: v.long() for n, v in tensors.items()}),
            r"int64 \(10, 64\), expected float32 \(10, 64\).*converted to its types of number",
        ),
    ],
)
def test_weights_of_another_model_are_refused_by_name(before, tmp_path, change, told):
    tensors = load_file(before / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "w.safetensors")
    plan = Plan.parse({**PLAIN, "initial": str(tmp_path / "w.safetensors")})
    with pytest.raises(ModelError, match=told):
        SimulationSetup.of(plan)


def test_a_file_that_was_changed_since_is_refused(before, tmp_path):
    file = tmp_path / "w.safetensors"
    file.write_bytes((before / "model.safetensors").read_bytes())
    plan = Plan.parse({**PLAIN, "initial": str(file)})
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(ModelError, match="the plan names"):
        SimulationSetup.of(plan)
    with pytest.raises(PlanError, match=r"initial\.weights.*cannot be read"):
        Plan.parse({**PLAIN, "initial": str(tmp_path / "nowhere")})
    with pytest.raises(PlanError, match=r"without initial\.weights"):
        Plan.parse({**PLAIN, "initial": {"trained_on": "x"}})


def test_an_error_for_other_weights_says_what_to_save(before, tmp_path):
    tensors, path = load_file(before / "model.safetensors"), tmp_path / "w.pt"
    checkpoint = {"state_dict": tensors, "epoch": 3}
    told = {r"holds state_dict \(dict\), epoch \(int\)": checkpoint, "holds list": [tensors]}
    for match, content in told.items():
        torch.save(content, path)
        with pytest.raises(ModelError, match=rf"{match}, which is no tensor.*that part, as torch"):
            SimulationSetup.of(Plan.parse({**PLAIN, "initial": str(path)}))
    torch.save(torch.load(path.with_name("w.pt"))[0], path)
    found = SimulationSetup.of(Plan.parse({**PLAIN, "initial": str(path)})).workshop.module()
    assert same(found, before / "model.safetensors")


class Normalised(torch.nn.Linear):
    """Records less their mean, as computed from them."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("mean", torch.tensor(0.7312))


def test_a_single_number_of_the_records_needs_a_statement():
    with pytest.raises(PlanError, match="begins with the same mean, whatever the seed"):
        InitialSettings().check_drawn("Normalised", Normalised(), Normalised())
    InitialSettings(trained_on="a public mean").check_drawn(
        "Normalised", Normalised(), Normalised()
    )


def test_weights_for_other_classes_or_columns_are_refused(tmp_path):
    """Their number alone would fit, and the first model would answer no for yes."""
    x = {"age": [0.1 * k for k in range(40)], "bmi": [1.0 - 0.05 * k for k in range(40)]}
    table = {**x, "ill": ["no", "yes"] * 20}
    how = {"label": "ill", "rounds": 1, "sites": 2, "privacy": {"mode": "none"}}
    first = fedpact.run(
        "logistic", table, out=tmp_path / "first", records={"classes": ["no", "yes"]}, **how
    )
    start = {"weights": str(first.folder), "trained_on": "made up"}
    for records in ({"classes": ["yes", "no"]}, {"features": ["bmi", "age"]}):
        with pytest.raises(PlanError, match=r"of a run with .* declare records"):
            fedpact.run(
                "logistic", table, out=tmp_path / "b", records=records, initial=start, **how
            )
    fedpact.run("logistic", table, out=tmp_path / "c", initial=start, **how)
