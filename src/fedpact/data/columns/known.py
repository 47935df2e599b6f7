"""What is publicly known of the columns of data sets that come by name.

NAME.toml, beside this file, has [records] for a plan on NAME: ranges, categories, what stands for a
gap, where a column begins. It is from the data set's own description and from what is known of such
measurements anyway. That the columns below say little was seen on the data set's training records,
too (experiments/heart), as settings of experiments are; whose records are not public asks somebody
who knows.
"""

from pathlib import Path
from typing import Final

# Narrowed arteries show in a history and in an exercise test.
_LITTLE: Final = ("trestbps scaled", "chol scaled", "fbs", "restecg=1", "restecg=2")
KNOWN: Final = {
    "adult": (),
    "heart_disease": (*_LITTLE, "restecg=0"),
    "heart_disease_flamby": _LITTLE,
    "shakespeare": (),
}
"""Data set -> those of its columns that are known to say little beside the others."""


def find_configuration(data: str) -> Path | None:
    """Return the configuration whose [records] goes with a data set, None where there is none."""
    return Path(__file__).with_name(f"{data}.toml") if data in KNOWN else None
