"""A made table with groups: an age, a sex, and an income that follows both."""

import numpy as np

COLUMNS = {
    "sex": {"categories": ["Female", "Male"]},
    "age": {"low": 0.0, "high": 1.0},
}


def people(path, rows=240):
    """Write the table, and return a plan whose sites are evaluated by sex."""
    rng = np.random.default_rng(0)
    lines = ["age,sex,income"]
    for _ in range(rows):
        age, sex = rng.random(), rng.integers(2)
        high = age + 0.3 * sex + 0.2 * rng.standard_normal() > 0.7
        lines.append(f"{age:.4f},{('Female', 'Male')[sex]},{('low', 'high')[int(high)]}")
    path.write_text("\n".join(lines) + "\n")
    return {
        "data": str(path),
        "label": "income",
        "records": {"classes": ["low", "high"], "columns": COLUMNS},
        "evaluation": {
            "share": 0.4,
            "epsilon": 5.0,
            "releases": ["hits", "roc"],
            "groups": "sex",
        },
    }
