"""Privacy once more: a ledger's events by dp-accounting, a Gaussian by its closed form."""

import math
from collections import Counter
from functools import cache

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.special import log_ndtr, ndtr

from fedpact.privacy.ledger.hash_chain import read_entries


def charges(folder, site):
    """The charges in a site's ledger of a run."""
    entries = read_entries(folder / "sites" / site / "ledger.jsonl")
    return [entry for entry in entries if entry["kind"] == "charge"]


def timeless(path):
    """The entries of a ledger but for the clock, and the hashes, which contain it."""
    return [
        {key: value for key, value in entry.items() if key not in ("time", "hash", "previous")}
        for entry in read_entries(path)
    ]


def gaussian_delta(mu, epsilon):
    """δ of a Gaussian with sensitivity/deviation μ, exactly: Balle, Wang 2018, Theorem 8."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def epsilon(events, delta, accountant="pld"):
    """ε of events (q, σ, count) together; like ones are one composition, and like lists one sum."""
    counts = Counter()
    for q, sigma, count in events:
        counts[q, sigma] += count
    return _epsilon(tuple(sorted(counts.items())), delta, accountant)


@cache
def _epsilon(counts, delta, by):
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(relation) if by == "pld" else RdpAccountant(None, relation)
    for (q, sigma), count in counts:
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), count)
    return accountant.get_epsilon(delta)
