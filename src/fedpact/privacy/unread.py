"""What is said where δ alone covers a record, as hardly any batch is likely to hold it."""

from collections.abc import Mapping

from fedpact.privacy.terms import Terms
from fedpact.text import upper


def by_delta_alone(terms: Mapping[str, Terms]) -> list[str]:
    """Return a line where (ε, δ) holds of whatever noise; nothing where noise has to make it hold.

    terms: of each site. Of a record that is in no batch nothing tells, and one is in a batch with
    probability Σ q_t at most, over all releases.
    """
    found = list[tuple[float, float]]()
    for one in terms.values():
        read = sum(event.q * count for event, count in one.history(one.steps).items())
        if read <= one.delta:
            found.append((read, one.delta))
    if not found:
        return []
    read, delta = max(found)
    return [
        f"Whoever is in a batch: at {len(found)} of {len(terms)} sites that is so of each with "
        f"probability {upper(read)} at most, no more than δ = {upper(delta)}, so that this (ε, δ) "
        "would hold without any noise. For a guarantee by noise, choose δ far below it."
    ]
