import json
from dataclasses import replace

import pytest

from fedpact.common.messages import RoundRecord, SiteScore


def record(number, sites, private):
    scored = number % 2 == 0
    scores = {s: SiteScore(0.5 + 0.4 * i / len(sites), 1.0, 10) for i, s in enumerate(sites)}
    return RoundRecord(
        round=number,
        accuracy=0.7 if scored else None,
        loss=1.25 if scored else None,
        metrics={"psi": 0.0125} if scored else {},
        scores=scores if scored else {},
        steps=3,
        epsilon=dict.fromkeys(sites, 0.3004 * number) if private else {},
        bytes_down=1000 * len(sites),
        bytes_up=2000 * len(sites),
        seconds=0.5,
    )


def terms(epsilon):
    return {
        "size": 120.0,
        "rate": 0.25,
        "clip": 1.5,
        "sigmas": {"gradient": 2.5},
        "sigma_joint": 2.5,
        "steps": 12,
        "epsilon": epsilon,
        "delta": 1e-5,
        "epsilon_reserved": epsilon - 0.0003,
        "epsilon_by": "PLD",
    }


def statement(budgets, private=True):
    """What privacy.json says: of sites with these budgets, by name."""
    return {
        "private": private,
        "unit": "record",
        "adjacency": "add/remove one record",
        "mechanism": "per_sample" if private else "none",
        "mechanism_meaning": "what is clipped",
        "accountant": "pld" if private else "none",
        "randomness": "seeded simulation",
        "sizes": "public",
        "simulator_only": ["what only a simulator sees"],
        "covers": ["all that a site sends"] if private else [],
        "does_not_cover": ["how long a site takes"] if private else [],
        "sites": {site: terms(epsilon) for site, epsilon in budgets.items()} if private else {},
    }


@pytest.fixture
def build(tmp_path):
    """Write a run's folder by hand: `build(sites, private=..., rounds=..., budgets=...)`."""
    return builder(tmp_path)


def change(folder, name, **entries):
    """Put other entries into one of a folder's documents."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return folder


def builder(tmp_path):
    """What the fixture is, for a folder of one's own."""

    def write(sites, *, private=True, rounds=4, budgets=None, labels=("cat", "dog"), **changes):
        budgets = budgets or [2.0] * len(sites)
        records = [record(number, sites, private) for number in range(rounds + 1)]
        records[-1] = replace(records[-1], **changes)
        documents = {
            "plan": {
                "algorithm": "fedavg",
                "data": "digits",
                "model": "logistic",
                "rounds": rounds,
                "settings": {"learning_rate": 0.125},
                "budget": {"bytes": 10**9},
            },
            "privacy": statement(dict(zip(sites, budgets, strict=True)), private),
            "summary": {
                "status": "finished",
                "epsilon": dict(records[-1].epsilon),
                "model_parameters": 650,
            },
            "environment": {"torch": "9.8.7"},
            "partition": {
                "train": {s: [0] for s in sites},
                "classes": labels,
                "label_counts": [
                    [10 * i + j for j in range(len(labels))] for i in range(len(sites))
                ],
            },
        }
        for name, document in documents.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(document))
        lines = "".join(r.to_json() + "\n" for r in records)
        (tmp_path / "rounds.jsonl").write_text(lines)
        return tmp_path

    return write
