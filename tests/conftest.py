"""For the whole suite: one intra-op thread, as reproducible runs have and xdist needs."""

import importlib
import pkgutil

import pytest
import torch

from fedpact import persample, privacy

torch.set_num_threads(1)


@pytest.fixture
def card(monkeypatch):
    """No number is at hand: what is done otherwise on a card is done here."""
    for package in (persample, privacy):
        for found in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            if "at_hand" in vars(module):
                monkeypatch.setattr(module, "at_hand", lambda _: False)
