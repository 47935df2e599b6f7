"""Over Flower: a deployment (transport, codec, the two apps, a site's own process), and Ray.

`round.py`, `client.py` and every algorithm run here unchanged. Nothing outside this package and
`fedpact.deploy` imports Flower.
"""

import os
from importlib.util import find_spec

from fedpact.errors import InputError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The environment in which neither Flower nor Ray reports to anybody."""


def require_flower() -> None:
    """Raise InputError, naming the extra, where Flower is not installed."""
    if find_spec("flwr") is None:
        raise InputError(
            "a deployment needs Flower, which is not installed: run pip install 'fedpact[deploy]'"
        )


def require_ray() -> None:
    """Have this process report to nobody; both packages read that when they are imported.

    Raises InputError, naming the extra, where Flower or Ray is not installed.
    """
    for package, name in (("flwr", "Flower"), ("ray", "Ray")):
        if find_spec(package) is None:
            raise InputError(
                f'engine "ray" needs {name}, which is not installed: run pip install '
                "'fedpact[ray]' on every machine of the cluster, or use engine \"local\""
            )
    os.environ.update(QUIET)
