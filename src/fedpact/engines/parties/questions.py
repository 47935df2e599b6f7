"""What a site lets itself be asked: a task of its own plan's form, with numbers in their ranges.

A server's mistake, or lie, ends here, before anything is charged, computed or remembered: a task of
round 10^12 would make every later one stale, a τ of a million would spend the budget at once.
"""

from torch import Tensor

from fedpact.errors import InputError
from fedpact.messages import EVALUATION, FINAL, Task, Vectors
from fedpact.methods.released import CONSTANTS
from fedpact.methods.short import whole
from fedpact.params import all_finite
from fedpact.plan import Plan

_MOST_ATTEMPTS = 1000


class Questions:
    """Checks tasks of a site. w: the model before the first round [d]. sites: the names of all."""

    def __init__(self, plan: Plan, w: Tensor, site: str, sites: tuple[str, ...]) -> None:
        told = plan.method.task(plan.method.init(w))
        self._vectors = {name: (v.shape, v.dtype) for name, v in told.vectors.items()}
        self._numbers, self._rounds = plan.method.task_numbers(), plan.rounds
        self._site, self._participants = site, plan.participants(sites)
        self._always = frozenset(told.numbers)
        self._first = 0 if plan.method.opens_run else 1
        model = {name: self._vectors[name] for name in ("w", CONSTANTS) if name in told.vectors}
        # Of questions that train nothing; None: the plan has no such question.
        self._others = {EVALUATION: model if plan.evaluation_terms else None, FINAL: model}
        self._told: dict[int, Vectors] = {0: told.vectors}

    def in_full(self, task: Task) -> tuple[Task | None, str, str]:
        """Return a task that may be carried out, in full; or None, a refusal's code, and why.

        A task may tell changes to what was told in the round before (methods.short), which is known
        as long as this object lives, and before the first one follows from the plan; the code is
        "model" where it is not known.
        """
        if task.algorithm in self._others:
            # Told in full, and nothing that a later task goes on from.
            wrong = self.fault(task)
            return (task, "", "") if wrong is None else (None, *wrong)
        base = self._told.get(task.round - 1)
        try:
            full = whole(task, base)
        except InputError as error:
            return None, "task", str(error)
        if full is None:
            text = f"it tells changes to a model of round {task.round - 1} that is not known here"
            return None, "model", text
        wrong = self.fault(full)
        if wrong is not None:
            return None, *wrong
        if full.round >= max(self._told, default=0):
            # The round before stays: the same question may come again.
            before = {} if base is None else {full.round - 1: base}
            self._told = {full.round: full.vectors, **before}
        return full, "", ""

    def fault(self, task: Task) -> tuple[str, str] | None:
        """Return a refusal's code, and what is wrong with a task in words; None if nothing is.

        Both follow from the task and the plan alone. The code is "budget" for a round beyond the
        plan's, for which nothing is reserved, and "task" for all else.
        """
        if task.round > self._rounds:
            return "budget", f"its round is {task.round}: the site reserved {self._rounds} rounds"
        wrong = self._wrong(task)
        return None if wrong is None else ("task", wrong)

    def _wrong(self, task: Task) -> str | None:
        other = task.algorithm in self._others
        vectors, numbers = self._vectors, self._numbers
        if other:
            vectors, numbers = self._others[task.algorithm], {}
        if vectors is None:
            return "it asks for an evaluation: expected none, as the plan has none"
        for name, value, least, most in (
            ("round", task.round, self._first, self._rounds),
            ("included", task.included, -1, task.round - (task.algorithm not in self._others)),
            ("attempt", task.attempt, 0, _MOST_ATTEMPTS),
        ):
            if not least <= value <= most:
                return f"its {name} is {value}: expected an integer from {least} to {most}"
        if not (other or self._site in (drawn := self._participants.of(task.round))):
            return f"round {task.round} is drawn to be of {_few(drawn)}: expected one of this site"
        found = {name: (v.shape, v.dtype) for name, v in task.vectors.items()}
        if found != vectors:
            return f"its vectors are {_few(found)}: expected {_few(vectors)}"
        for name, value in task.numbers.items():
            expected = numbers.get(name)
            if expected is None:
                return f"it has a number {name!r}: expected none but {_few(numbers)}"
            if not expected.holds(value):
                return f"its number {name!r} is {value!r}: expected {expected}"
        for name in sorted((frozenset() if other else self._always) - task.numbers.keys()):
            return f"it has no number {name!r}, which every task of this plan has"
        if not all(map(all_finite, task.vectors.values())):
            return "its vectors hold NaN or infinity: expected finite numbers"
        return None


def _few(names: object) -> str:
    """A text of at most a line, whatever a stranger has sent."""
    text = str(names)
    return text if len(text) <= 200 else text[:200] + " ..."
