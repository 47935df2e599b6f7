"""Flower's database is there in full, however often its making was cut off."""

import sqlite3
from contextlib import closing
from types import SimpleNamespace

import pytest
from alembic import command
from flwr.server.superlink.linkstate import SqlLinkState
from flwr.supercore.state.alembic.utils import build_alembic_config
from sqlalchemy import create_engine

from fedpact.deployment.flower import server_process

# Flower's own set-up of Alembic, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")


def tables(path):
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("flower") / "superlink.db"
    assert server_process.prepare_database(path) is True
    return path


def test_it_is_what_a_superlink_would_have_made_and_is_kept(whole, tmp_path):
    assert server_process.prepare_database(whole) is False
    assert whole.stat().st_mode & 0o777 == 0o600
    own = tmp_path / "own.db"
    SqlLinkState(str(own), SimpleNamespace(), None).initialize()
    assert tables(whole) == tables(own) != set()
    # Flower's own start finds nothing left to do.
    SqlLinkState(str(whole), SimpleNamespace(), None).initialize()
    assert tables(whole) == tables(own)


def half_made(path):
    """As Flower's own start leaves it when it is killed: tables, and not their version."""
    engine = create_engine(f"sqlite:///{path}")
    config = build_alembic_config(engine)
    first = server_process.ScriptDirectory.from_config(config).get_bases()[0]
    command.upgrade(config, first)
    engine.dispose()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE alembic_version")


def garbage(path):
    path.write_bytes(b"no database\n" * 500)
    path.with_name(path.name + "-wal").write_bytes(b"of another file")


def another_version(path):
    half_made(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('of_the_future')")
        connection.commit()


@pytest.mark.parametrize("spoil", [half_made, garbage, another_version])
def test_one_that_no_superlink_could_open_is_made_anew(whole, tmp_path, spoil):
    path = tmp_path / "superlink.db"
    spoil(path)
    assert server_process.prepare_database(path) is True
    assert tables(path) == tables(whole)
    assert [each.name for each in tmp_path.iterdir()] == ["superlink.db"]


def test_a_making_that_is_cut_off_leaves_no_database(whole, tmp_path, monkeypatch):
    path = tmp_path / "superlink.db"

    def cut_off(engine):
        half_made(engine.url.database)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(server_process, "run_migrations", cut_off)
        with pytest.raises(KeyboardInterrupt):
            server_process.prepare_database(path)
    assert not path.exists()
    assert server_process.prepare_database(path) is True
    assert tables(path) == tables(whole)
