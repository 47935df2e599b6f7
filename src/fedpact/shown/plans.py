"""A plan in a line, as a card and as a table."""

from typing import Any

from fedpact.configuration import DEFAULTS_KEY, flatten
from fedpact.shown.cards import CardFigure, card, frame
from fedpact.text import upper


class ShownPlan:
    """What a plan shows of itself. `Any`, as this stands below what a plan is."""

    def __repr__(self) -> str:
        figures = (f"{figure.label} {figure.value}" for figure in _figures(self))
        return f"Plan({', '.join(figures)})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        plan: Any = self
        whole = plan.document()
        chosen = sorted(set(flatten(whole)) - {*whole[DEFAULTS_KEY], DEFAULTS_KEY})
        return card("Plan", _figures(self), below=f"chosen: {', '.join(chosen)}")

    def frame(self) -> Any:
        """Return every setting in effect as a pandas DataFrame: key, value, default (nobody gave).

        Raises InputError: pandas is not installed.
        """
        plan: Any = self
        whole = plan.document()
        unset = set(whole.pop(DEFAULTS_KEY))
        rows = [{"key": k, "value": v, "default": k in unset} for k, v in flatten(whole).items()]
        return frame(rows, "plan.document()")


def _figures(plan: Any) -> list[CardFigure]:
    privacy = plan.privacy
    epsilon = privacy.epsilon if isinstance(privacy.epsilon, list) else [privacy.epsilon]
    bound = f"{upper(max(epsilon))} per {privacy.unit}"
    return [
        CardFigure("algorithm", plan.algorithm),
        CardFigure("data", plan.data),
        CardFigure("model", str(plan.model)),
        CardFigure("sites", f"{plan.sites:,}"),
        *([CardFigure("sites per round", str(part))] if (part := plan.sites_per_round) else []),
        # What ε is of: the rounds before were another reservation's.
        CardFigure("rounds", f"{plan.after + 1:,} to " * bool(plan.after) + f"{plan.rounds:,}"),
        CardFigure("ε", bound if plan.private else "NOT PRIVATE", bad=not plan.private),
        *([CardFigure("δ", str(privacy.delta))] if plan.private else []),
    ]
