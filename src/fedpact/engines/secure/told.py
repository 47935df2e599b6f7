"""What secure aggregation adds to what a run says of its privacy."""

from fedpact.engines.secure.circle import colluding
from fedpact.plan import Plan
from fedpact.theory.neighbours import neighbourhoods


def secure_terms(plan: Plan, sites: int) -> dict[str, int] | None:
    """Return what a run's secure aggregation is, None where it has none.

    neighbours: with how many others each site shares masks. against: how many may work for the
    server, whoever they are, and whomever it leaves out.
    """
    threshold = plan.secure_aggregation.threshold
    if not threshold:
        return None
    against = colluding(plan, sites)
    neighbours = neighbourhoods(sites, threshold, against).neighbours
    told = {"threshold": threshold, "sites": sites}
    return told | {"neighbours": neighbours, "against": against}


def secure_lines(plan: Plan, sites: int) -> list[str]:
    """Return what secure aggregation adds to a private run's guarantee; nothing without either."""
    threshold = plan.secure_aggregation.threshold
    if not (threshold and plan.private):
        return []
    if plan.privacy.honest:
        return [_shared_line(plan, sites)]
    return [
        f"Secure aggregation, threshold {threshold} of {sites} sites: a server that follows the "
        f"protocol sees weighted means over at least {threshold} sites and no single site's "
        "vector. It needs others that keep their part secret, and adds nothing to (ε, δ): the ε "
        "stated here does not use it, and holds against a server that sees everything."
    ]


def _shared_line(plan: Plan, sites: int) -> str:
    """Return what ε needs where sites share noise out."""
    threshold, honest = plan.secure_aggregation.threshold, plan.privacy.honest
    return (
        f"Noise for the sum: ε holds against the server and up to {threshold - honest} of the "
        f"sites together, whoever looks at an opened sum among them, if in each sum {honest} other "
        f"sites add their share of noise and tell nobody (threshold {threshold} of {sites} sites), "
        "and as far as the cryptography of secure aggregation holds. Against everybody together, "
        "and without any assumption, the larger ε holds that is stated beside it (alone)."
    )
