"""The errors fedpact raises on purpose.

    FedpactError                the base class
    ├── InputError              an invalid setting, argument or file
    │   ├── PlanError           an inconsistent configuration
    │   ├── DataError           records, labels, a partition or a data file
    │   └── ModelError          a model that cannot be trained as requested
    ├── PrivacyError            a release that a site refuses
    │   ├── BudgetExhausted     it would exceed the site's (ε, δ)
    │   └── PolicyRefused       the site's policy or reservation does not name it
    ├── LedgerError             a ledger that is unreadable, altered or in use
    └── TransportLost           the process that carries a party's messages has ended

Every message is one paragraph: what is wrong, the name and value that show it, and what to do.
A message from a site never quotes its data.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class FedpactError(Exception):
    """The base class of all errors that fedpact raises on purpose.

    exit_code: the exit status of a process that ends because of it.
    """

    exit_code = 2


class InputError(FedpactError, ValueError):
    """A setting, an argument or a file is invalid."""


class PlanError(InputError):
    """A configuration is refused as a whole."""


class DataError(InputError):
    """Records, labels, a partition or a data file cannot be used."""


class ModelError(InputError):
    """A model cannot be trained as requested."""


class PrivacyError(FedpactError):
    """A release that a site refuses."""


class BudgetExhausted(PrivacyError):
    """The release would exceed what the site reserved or allows."""


class PolicyRefused(PrivacyError):
    """The site's policy or reservation does not name this release."""


class LedgerError(FedpactError):
    """A ledger is unreadable, altered or in use by another process."""


class TransportLost(FedpactError):
    """The process that carries a party's messages has ended, or does not answer."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an error about an unknown name, or "".

    >>> nearest("fedprx", ["fedavg", "fedprox"]), nearest("x", ["fedavg"])
    ("; the nearest is 'fedprox'", '')
    """
    found = get_close_matches(name, list(known), n=1)
    return f"; the nearest is {found[0]!r}" if found else ""


def with_colon(name: str) -> str:
    """Return what to append to an error about a name that has a dot where a colon belongs, or "".

    >>> with_colon("mypackage/half.py"), with_colon("half")
    ("; if it is your own, write 'mypackage:half'", '')
    """
    module, dot, last = name.removesuffix(".py").replace("/", ".").rpartition(".")
    return f"; if it is your own, write '{module}:{last}'" if dot and ":" not in name else ""
