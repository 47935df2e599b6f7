"""A federation whose sites share their noise out: tables of its plan."""

from fedpact.plan import Plan

SUM = {
    "sites": 5,
    "rounds": 4,
    "sampling_rate": 0.2,
    "secure_aggregation": {"threshold": 4},
    "privacy": {"trust": "sum", "honest": 3},
    "run": {"workers": 1},
}
COMMON = {"loss_of": "common"}
FAIR = {"algorithm": "fedfdp", "settings": COMMON}


def plan_of(**tables):
    return Plan.parse({**SUM, **tables})
