"""What tests of other people's models have in common: the run that they are handed to."""

import json

import pytest

import fedpact


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Carry out one private round at two sites; the model has to be traced."""
    monkeypatch.setattr("fedpact.api.write_report", lambda folder: None)

    def run(make, data, **settings):
        given = {"sites": 2, "rounds": 1, "sampling_rate": 0.5, "privacy": {"epsilon": 4.0}}
        result = fedpact.run(make, data, out=tmp_path / "run", **{**given, **settings})
        told = json.loads((result.folder / "privacy.json").read_text())["separation"]
        assert "traced" in told
        return result

    return run
