"""fedpact: train one model across data owners who keep their records."""

from fedpact.api import run
from fedpact.data.datasets import from_arrays
from fedpact.engines.simulation import Result
from fedpact.errors import FedpactError
from fedpact.plan import Plan

__all__ = ["FedpactError", "Plan", "Result", "from_arrays", "run"]
