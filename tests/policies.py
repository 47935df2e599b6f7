"""Policies of sites, for tests of which each changes some of what is allowed."""

import json

ALLOWED = {
    "algorithms": ["fedavg"],
    "releases": ["gradient"],
    "epsilon_per_run": 2.0,
    "delta_per_run": 1e-5,
    "epsilon_ever": 3.0,
    "delta_ever": 2e-5,
    "smallest_sigma": 1.0,
}
GENEROUS = ALLOWED | dict.fromkeys(("epsilon_per_run", "epsilon_ever"), 9.0)
GENEROUS |= dict.fromkeys(("delta_per_run", "delta_ever"), 1e-3) | {"smallest_sigma": 1e-3}


def write_policy(path, **allowed):
    """Write the file of a policy; return its path as a plan has it."""
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in (ALLOWED | allowed).items()]
    path.write_text("".join(lines))
    return str(path)
