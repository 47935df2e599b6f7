"""Shakespeare's plays, a site for each speaking role: which character comes next?

The text is a list of speeches, "ROLE:" and then lines, with a blank line behind each. What a role
says in all of them is cut into pieces of 41 characters, none in two of them: 40 are a record, the
last one is its label. A piece is written with the 65 characters that are declared here. Roles that
have fewer than 100 pieces take no part. As LEAF has it (Caldas et al., arXiv 1812.01097), but for
pieces that do not overlap, so that a character is in one record.
"""

from typing import Final

import torch

from fedpact.data.dataset import Dataset
from fedpact.data.files import SOURCES, read_verified
from fedpact.errors import DataError

CHARACTERS: Final = (
    "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # the text's, by code
)
LENGTH: Final = 40
_LEAST: Final = 100


def load_shakespeare() -> Dataset:
    """Return records x [n, 40] and labels, places in CHARACTERS; site: the role.

    Raises DataError: the file is missing or damaged.
    """
    source = SOURCES["shakespeare"]
    (file,) = source.files
    return of_roles(roles(read_verified(source, file).decode("ascii")))


def roles(text: str) -> dict[str, str]:
    """Return what each role says, its speeches one after another."""
    found = dict[str, list[str]]()
    for speech in text.split("\n\n"):
        name, colon, said = speech.strip("\n").partition(":\n")
        if colon and "\n" not in name:
            found.setdefault(name, []).append(said)
    return {name: "\n".join(speeches) for name, speeches in found.items()}


def of_roles(said: dict[str, str], least: int = _LEAST) -> Dataset:
    """Return the data set of roles that have at least so many pieces. Raises DataError: none."""
    place = {character: k for k, character in enumerate(CHARACTERS)}
    rows, sites = list[list[int]](), list[str]()
    for name, text in sorted(said.items()):
        # Another text may have others: they are left out of it.
        codes = [place[c] for c in text if c in place]
        pieces = len(codes) // (LENGTH + 1)
        if pieces < least:
            continue
        rows += [codes[k * (LENGTH + 1) : (k + 1) * (LENGTH + 1)] for k in range(pieces)]
        sites += [name] * pieces
    if not rows:
        raise DataError(
            f"data set shakespeare: no role has {least} pieces of {LENGTH + 1} characters: "
            "expected speeches, each a line 'ROLE:' with lines below it and a blank line behind"
        )
    pieces = torch.tensor(rows)
    return Dataset(
        name="shakespeare",
        x=pieces[:, :LENGTH].contiguous(),
        y=pieces[:, LENGTH].contiguous(),
        classes=tuple(map(repr, CHARACTERS)),
        site=tuple(sites),
        description=f"Shakespeare's plays, {len(set(sites))} roles; the next of 65 characters",
    )
