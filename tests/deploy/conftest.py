"""A deployment's files, made once; each test that changes something works on a copy."""

import shutil
import socket
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedpact[deploy] is not installed")

from fedpact.deploy.write import Choices, write
from fedpact.plan import Plan

PLAN = {"rounds": 5, "sites": 3, "privacy": {"accountant": "rdp"}, "settings": {"local_steps": 2}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def make():
    """make(directory, choices, **plan) writes a deployment whose server has a port of its own."""

    def new_deployment(directory: Path, choices=None, **plan) -> Path:
        chosen = Choices(port=free_port(), **(choices or {}))
        write(directory, Plan.parse({**PLAN, **plan}), chosen)
        return directory

    return new_deployment


@pytest.fixture(scope="session")
def written(make, tmp_path_factory):
    """Secure draws, as a deployment's default is."""
    return make(tmp_path_factory.mktemp("deploy") / "secure")


@pytest.fixture
def deployment(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "deployment"))


@pytest.fixture
def site_dir(deployment):
    return deployment / "sites" / "site-00"
