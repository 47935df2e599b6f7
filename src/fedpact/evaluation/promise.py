"""What a site's ledger has of evaluations: a promise beside the run's, and a charge for each."""

from collections.abc import Callable

from fedpact.ledger.ledger import Ledger
from fedpact.ledger.reservations import CompanionReservation
from fedpact.messages import Task
from fedpact.privacy.once import FullDataRelease
from fedpact.theory.accounting import SampledGaussian


def name_reservation(run: str) -> str:
    """Return what a ledger calls a run's evaluations. No run has such a name."""
    return f"{run}/evaluation"


def reserve(ledger: Ledger, run: str, once: FullDataRelease, split: str, unit: str) -> None:
    """Promise a run's evaluations, of the records that a split holds out of its training.

    unit: whom its (ε, δ) is of, as the run's; a split by records is none by persons. Raises what
    Ledger.reserve raises, as where the split was another one.
    """
    ledger.reserve(
        name_reservation(run),
        once.budget,
        once.history,
        beside=CompanionReservation(run, split),
        unit=unit,
    )


def charge_of(ledger: Ledger, task: Task) -> Callable[[SampledGaussian, tuple[str, ...]], None]:
    """Return what charges the evaluation that a task asks for."""

    def charge(event: SampledGaussian, purpose: tuple[str, ...]) -> None:
        ledger.charge(
            name_reservation(task.run),
            f"{task.round}/{task.digest}",
            event,
            1,
            purpose=purpose,
            round_number=task.round,
            attempt=task.attempt,
        )

    return charge
