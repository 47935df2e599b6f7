"""What a recommendation says of its rounds and of its noise."""

from collections.abc import Iterable

from fedpact.text import upper
from fedpact.theory.full_batch import FullBatch


def pay(chosen: FullBatch) -> str:
    """Return why there are so many rounds."""
    if chosen.rounds < chosen.useful:
        return f"were allowed; {chosen.useful} would pay at this signal to noise"
    return "pay at this signal to noise"


def delta_too_large(promised: Iterable[tuple[float, float]]) -> str:
    """Return what a δ of 1/N or more leaves open, of (δ, N) of each site; "" where none has it."""
    worst = max(promised, key=lambda one: one[0] * one[1], default=(0.0, 0.0))
    delta, size = worst
    if not delta * size >= 1:
        return ""
    return (
        f"δ = {upper(delta)} at a site of {size:g} records lets each record be told with that "
        f"chance, so one of them or more: expected a δ far below 1/N, as {0.01 / size:.1g} is"
    )


def noise_dominates(snr: float, *, columns: bool, alone: bool) -> tuple[str, str]:
    """Return how far noise goes, of a signal to noise below 1, and what would help.

    columns: whether a record's numbers are trained on as they are. alone: whether each site has all
    its own noise where sites could share it out.
    """
    ways = ["a larger ε or δ", "more records"]
    ways += ["fewer columns"] * columns + ["--trust sum"] * alone
    return (
        f"noise goes {1 / snr:.2g} times as far as all records together can",
        "expected the opposite, ten times; what is trained may be little better than a guess. What "
        f"would help: {', '.join(ways)}",
    )
