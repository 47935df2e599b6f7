"""The SuperLink's database, made before a SuperLink opens it: whole, or not there.

A SuperLink makes its tables in the file itself, one by one, and one that is killed meanwhile leaves
a file that none can open any more. What is in there can all be had again: the sites' nodes are
registered at every start, and every start begins a run of its own in Flower. So a file that is
half made, damaged, or another version's is replaced by a new one, which is made aside.
"""

from pathlib import Path

from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from flwr.supercore.state.alembic.utils import build_alembic_config, run_migrations
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from fedpact.files import replacing

_BESIDE = ("-wal", "-shm", "-journal")


def prepare(path: Path) -> bool:
    """Have a database at `path` that a SuperLink of this version opens; say whether it is new."""
    if path.exists() and _is_whole(path):
        return False
    # What SQLite keeps beside the old file must not be taken for a part of the new one.
    for suffix in _BESIDE:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    with replacing(path, private=True) as partial:
        run_migrations(_engine(partial))
    return True


def _is_whole(path: Path) -> bool:
    engine = _engine(path)
    wanted = set(ScriptDirectory.from_config(build_alembic_config(engine)).get_heads())
    try:
        with engine.connect() as connection:
            found = set(MigrationContext.configure(connection).get_current_heads())
            return found == wanted and connection.scalar(text("PRAGMA quick_check")) == "ok"
    except SQLAlchemyError:
        return False


def _engine(path: Path) -> Engine:
    return create_engine(f"sqlite:///{path.resolve()}", poolclass=NullPool)
