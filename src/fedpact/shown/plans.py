"""A plan in a line, as a card and as a table."""

from typing import Any

from fedpact.configuration import DEFAULTS, leaves
from fedpact.shown.cards import CardFigure, card, frame
from fedpact.text import upper


def told(plan: Any) -> str:
    """Return what matters of a plan, in a line."""
    return f"Plan({', '.join(f'{figure.label} {figure.value}' for figure in _figures(plan))})"


def card_of(plan: Any) -> str:
    """Return a card, with what somebody chose."""
    whole = plan.document()
    chosen = sorted(set(leaves(whole)) - {*whole[DEFAULTS], DEFAULTS})
    return card("Plan", _figures(plan), below=f"chosen: {', '.join(chosen)}")


def frame_of(plan: Any) -> Any:
    """Return a DataFrame: key, value, default. Raises InputError: pandas is not installed."""
    whole = plan.document()
    unset = set(whole.pop(DEFAULTS))
    rows = [{"key": k, "value": v, "default": k in unset} for k, v in leaves(whole).items()]
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
        CardFigure("rounds", f"{plan.rounds:,}"),
        CardFigure("ε", bound if plan.private else "NOT PRIVATE", bad=not plan.private),
        *([CardFigure("δ", str(privacy.delta))] if plan.private else []),
    ]
