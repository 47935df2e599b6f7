"""A round's update that no single reply can bring down: what it fails by is found and left out.

A reply is to blame where the update fails on it alone. Where it fails only on several together, the
one with the largest entry goes, and so on until the update succeeds. Sums under secure aggregation
have no single replies behind them: there all are to blame or none.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedpact.messages import Refusal, Reply, State, encoded_length
from fedpact.methods import Method
from fedpact.params import all_finite


@dataclass(frozen=True)
class Folded:
    """What came of a round. blamed: site -> why, of the replies that were left out."""

    state: State
    blamed: dict[str, str]


def fold_replies(method: Method, state: State, replies: Sequence[Reply]) -> Folded:
    """Return the next state, without the replies that make the update raise or not finite.

    replies: at least one. Where all of them do, the update's own outcome with all: a state that is
    not finite, or what it raises.
    """
    after, why = _tried(method, state, replies)
    if after is not None:
        return Folded(after, {})
    good, blamed = list[Reply](), dict[str, str]()
    for reply in replies:
        alone, why = _tried(method, state, [reply])
        if alone is None:
            blamed[reply.site] = why
        else:
            good.append(reply)
    while good:
        after, why = _tried(method, state, good)
        if after is not None:
            return Folded(after, blamed)
        worst = max(good, key=_largest)
        good.remove(worst)
        blamed[worst.site] = why
    return Folded(method.update(state, iter(replies)), {})


class Tally:
    """Counts answers on their way to `update`, and takes out the refusals."""

    def __init__(self) -> None:
        self.bytes = 0
        self.replied: list[str] = []
        self.refused: dict[str, str] = {}

    def through(self, answers: Iterator[Reply | Refusal]) -> Iterator[Reply]:
        """Yield the replies among the answers."""
        for answer in answers:
            self.bytes += encoded_length(answer)
            if isinstance(answer, Refusal):
                self.refused[answer.site] = answer.code
            else:
                self.replied.append(answer.site)
                yield answer

    def reject(self, site: str) -> None:
        """Count a reply that was taken for a refusal."""
        self.replied.remove(site)
        self.refused[site] = "rejected: update"


def _tried(method: Method, state: State, replies: Sequence[Reply]) -> tuple[State | None, str]:
    """Return the next state, or None and what is wrong."""
    try:
        after = method.update(state, iter(replies))
    except Exception as error:  # whatever an algorithm may raise at what a stranger sent
        return None, f"{type(error).__name__}: {error}"
    finite = all(map(all_finite, after.vectors.values()))
    if finite and all(map(math.isfinite, after.numbers.values())):
        return after, ""
    return None, "the state is not finite any more"


def _largest(reply: Reply) -> float:
    """The largest entry of a reply, in absolute value; NaN counts as infinite."""
    parts = [float(v.double().abs().max()) for v in reply.vectors.values() if v.numel()]
    parts += [abs(number) for number in reply.numbers.values()]
    return max((math.inf if math.isnan(part) else part for part in parts), default=0.0)
