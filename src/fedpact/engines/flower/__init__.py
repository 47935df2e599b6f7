"""A deployment over Flower: transport, codec, the two apps, and a site's own process.

`round.py`, `client.py` and every algorithm run here unchanged. Nothing outside this package and
`fedpact.deploy` imports Flower.
"""

from importlib.util import find_spec

from fedpact.errors import InputError


def require_flower() -> None:
    """Raise InputError, naming the extra, where Flower is not installed."""
    if find_spec("flwr") is None:
        raise InputError(
            "a deployment needs Flower, which is not installed: run pip install 'fedpact[deploy]'"
        )
