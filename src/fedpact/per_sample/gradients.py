"""Per-sample gradients of one parameter: their norms, and their weighted sum.

Each use of a parameter leaves a Share, which computes the gradients G_j of some records. `part`
turns the shares of a parameter into squared norms ‖G_j‖² and a function that adds Σ_j c_j G_j.

The numbers that are measured are the numbers that are added. Otherwise a record whose positions
cancel (G_j = Σ_t g_t u_tᵀ is small, its terms are huge) would be weighted by its small norm, and
the rounding of its huge terms would exceed the clip. So

one position     G_j = g_j u_jᵀ: ‖G_j‖ = ‖g_j‖‖u_j‖ is exact, and each record is one term of the
                 product (G c)ᵀ U.
several          G_j is computed as a matrix, which is measured and added. It is kept, or computed
                 again by the same calls from the same numbers.
few, and wide    A matrix for each record would cost more than the product. Norms and product are
                 in float64, and no norm is below FLOOR times the sum of its terms' lengths.

docs/notes/proofs.md proves how far one record moves a sum. It assumes of the code that products in
float32 run over at most TOGETHER records, and sums over at most IN_FLOAT32; and where c is float64,
so are all products.

Sources: Goodfellow, arXiv 1510.01799 (one position); Li, Tramèr, Liang, Hashimoto, arXiv 2110.05679
(ghost norm); Bu, Wang, Zha, Karypis, arXiv 2210.00038 (book-keeping).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpact.per_sample import norms
from fedpact.per_sample.norms import (
    flatten_rows,
    keep_good,
    rough_squares,
    slices,
    square_sums,
    wide,
)
from fedpact.per_sample.products import products

TOGETHER = 128
"""So many records' terms float32 may add in one product; docs/notes/proofs.md has why."""

IN_FLOAT32 = 512
"""Up to so many records float32 sums; more are summed in float64 and rounded once."""

PARTIAL_SUMS = 16
"""Float32 adds up so many passes' sums at most."""

FLOOR = 2.0**-10
"""A norm from float64 Gram matrices is at least so much of Σ_t ‖g_t‖‖u_t‖."""

_FEW = 16
"""So many positions at most, where gradients are kept: their second product costs more."""

_GOOD = 2**18
"""Below this sum T² + O + K Gram matrices are good to 2^-15."""

_TERMS = 2**13
"""So many of a Gram product's terms at most are added at a time; docs/notes/proofs.md has why."""


@dataclass(frozen=True)
class Part:
    """Of one parameter: squares [P] is ‖G_j‖²; add(c [P], good, view) adds Σ_j c_j G_j.

    good [P]: the slots to add, c is 0 elsewhere; None where the numbers of all slots are finite. 0
    times infinity is not a number, so the others' gradients are set to 0 first. view: the
    parameter's place in the total, of c's type. Squares that underflow may be too small: below
    norms.least_square they count as that.
    """

    squares: Tensor
    add: Callable[[Tensor, Tensor | None, Tensor], None]


@dataclass(frozen=True)
class Measured:
    """One pass: losses [P] and ‖g_j‖ [P] in float64; of empty slots they are anything.

    add(c, good, total) adds Σ_j c_j g_j to total [d], for c [P] of its type; good: see Part.
    factors: whatever the sum is made of, each [P, ...].
    """

    losses: Tensor
    norms: Tensor
    add: Callable[[Tensor, Tensor | None, Tensor], None]
    factors: Callable[[], list[Tensor]]


class Share(ABC):
    """What one use of a parameter contributes to its per-sample gradients.

    batch: B. size: numbers in one gradient. like: a tensor of the type and on the device of these.
    most: the most records to make gradients of at a time.
    """

    def __init__(self, batch: int, size: int, like: Tensor, most: int = TOGETHER) -> None:
        self.batch, self.size, self.like, self.most = batch, size, like, min(most, TOGETHER)

    @abstractmethod
    def quick_rows(self, chunk: slice) -> Tensor:
        """The gradients [n, size] of a chunk's records, in the order that is fastest to compute."""

    def minus(self, other: "Share") -> "list[Share]":
        """Shares whose sum is this one less another one of the same parameter."""
        return [self, Mapped(other, torch.neg, other.size)]

    @property
    def nbytes(self) -> int:
        """Bytes of one gradient."""
        return self.size * self.like.element_size()

    def factors(self) -> list[Tensor]:
        """What the gradients are computed from, each [B, ...], to compare passes bit for bit."""
        return [self.rows(slice(0, self.batch))]

    def arrange(self, total: Tensor) -> Tensor:
        """Return quick rows, or a sum of them, [..., size] in the parameter's own order."""
        return total

    def rows(self, chunk: slice) -> Tensor:
        """The gradients [n, size] of a chunk's records in the parameter's own order."""
        return flatten_rows(self.arrange(self.quick_rows(chunk)))

    def special(self) -> Part | None:
        """Return a faster way to measure and sum, without rows; None if there is none."""
        return None


class Mapped(Share):
    """Gradients that are a linear function of those of another share, record by record.

    function: rows [n, ...] of the other share -> rows [n, size].
    """

    def __init__(self, share: Share, function: Callable[[Tensor], Tensor], size: int) -> None:
        super().__init__(share.batch, size, share.like, share.most)
        self._share, self._function = share, function

    def quick_rows(self, chunk: slice) -> Tensor:
        """See Share."""
        return self._function(self._share.rows(chunk))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one form are the same memory.

    The numbers are not compared: one record's would then decide how the others are summed.
    """
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def is_few(like: Tensor, positions: int, size: int, read: int, least: int = 9) -> bool:
    """Whether Gram matrices of so many positions cost less than gradients [size / read, read].

    By measurement: where a gradient has more than `least` times the numbers of its factors. like:
    one of these, [B, ...].
    """
    numbers = size // max(read, 1) + read
    kept = len(like) * size * like.element_size() <= norms.keep_bytes(like)
    few = positions**2 + numbers < _GOOD and (positions <= _FEW or not kept)
    # Squares of float64's squares have no place in float64.
    return few and size > least * positions * numbers and like.dtype != torch.float64


_Digits = Callable[[], AbstractContextManager[object]]


def part(shares: list[Share], digits: _Digits = nullcontext) -> Part:
    """The Part of a parameter whose gradient is the sum of the shares.

    digits: a context in which gradients are computed.
    """
    share = sum_of(shares)
    return share.special() or _by_rows(share, digits)


def together(shares: dict[str, list[Share]]) -> list[tuple[list[str], list[Share]]]:
    """Shares by the names of their parameters, short rows that are made of several as one."""
    short = {
        name: some[0].rows(slice(0, some[0].batch))
        for name, some in shares.items()
        if len(some) == 1 and type(some[0]) is Made and some[0].size <= norms.BLOCK
    }
    groups = [([name], some) for name, some in shares.items() if some and name not in short]
    if short:
        groups.append(([*short], [Made(torch.cat([*short.values()], 1))]))
    return groups


def difference(shares: list[Share], others: list[Share]) -> list[Share]:
    """Shares of the difference of two gradients, each the sum of its shares.

    Terms of the two cancel where the points are near, so uses are paired one by one: an outer
    product then becomes two terms as small as the difference itself.
    """
    if len(shares) != len(others):
        return shares + [Mapped(other, torch.neg, other.size) for other in others]
    return [one for a, b in zip(shares, others, strict=True) for one in a.minus(b)]


def _by_rows(share: Share, digits: _Digits) -> Part:
    pieces = norms.chunks(share.batch, share.nbytes, share.like, share.most)
    kept = share.batch * share.nbytes <= norms.keep_bytes(share.like)
    made: dict[int, Tensor] = {}
    squares: list[Tensor] = []

    def rows(chunk: slice) -> Tensor:
        # Made again by the same call from the same numbers, it has the bits that were measured.
        if chunk.start in made:
            return made[chunk.start]
        with digits():
            return share.quick_rows(chunk)

    for chunk in pieces:
        found = rows(chunk)
        # While they are in the cache.
        squares.append(rough_squares(found))
        if kept:
            made[chunk.start] = found

    def add(c: Tensor, good: Tensor | None, view: Tensor) -> None:
        total = c.new_zeros(share.size)
        started = 0
        for chunk in pieces:
            # Float32 adds so many records and no more; their sums are added in `view`'s type.
            if chunk.stop - started > TOGETHER:
                _into(share, total, view)
                started = chunk.start
            found = keep_good(None if good is None else good[chunk], rows(chunk))
            total.addmv_(found.to(c.dtype).t(), c[chunk])
        _into(share, total, view)

    return Part(torch.cat(squares), add)


def _into(share: Share, total: Tensor, view: Tensor) -> None:
    found = share.arrange(total).reshape(view.shape)
    # Copied first where it lies across memory: adding then takes half the time.
    view.add_(found if found.stride() == view.stride() else torch.empty_like(view).copy_(found))
    total.zero_()


class Made(Share):
    """Gradients that are already computed, rows [B, size]."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = flatten_rows(wide(rows))
        super().__init__(len(self._rows), self._rows.shape[1], self._rows)

    def quick_rows(self, chunk: slice) -> Tensor:
        """See Share."""
        return self._rows[chunk]


class Outer(Share):
    """Σ_t g_t u_tᵀ [O, K] from g [B, T, O] and u [B, T, K]."""

    def __init__(self, g: Tensor, u: Tensor) -> None:
        batch, self.length, out = g.shape
        super().__init__(batch, out * u.shape[2], g)
        self.g, self.u = g, u
        self._turned = out > u.shape[2]

    def quick_rows(self, chunk: slice) -> Tensor:
        """See Share: as [K, O] where that makes the rows of the product longer, which is faster."""
        g, u = self.g[chunk], self.u[chunk]
        a, b = (u, g) if self._turned else (g, u)
        return flatten_rows(products(a.mT, b))

    def arrange(self, total: Tensor) -> Tensor:
        """See Share."""
        if not self._turned:
            return total
        return total.view(*total.shape[:-1], self.u.shape[2], self.g.shape[2]).mT

    def minus(self, other: Share) -> list[Share]:
        """g uᵀ - g' u'ᵀ = (g - g') uᵀ + g' (u - u')ᵀ: two terms as small as the difference."""
        if not isinstance(other, Outer) or other.u.shape != self.u.shape:
            return super().minus(other)
        u = [self.u] if same(self.u, other.u) else [self.u, self.u - other.u]
        g = [self.g - other.g, other.g][: len(u)]
        return [Outer(torch.cat(g, 1), torch.cat(u, 1))]

    def factors(self) -> list[Tensor]:
        """See Share."""
        return [self.g, self.u]

    def special(self) -> Part | None:
        """See Share: one position, or few and wide."""
        if self.length == 1:
            return self._one_position()
        return self.by_gram() if is_few(self.g, self.length, self.size, self.u.shape[2]) else None

    def _one_position(self) -> Part:
        g, u = self.g[:, 0], self.u[:, 0]
        squares = square_sums(g) * square_sums(u)

        def add(c: Tensor, good: Tensor | None, view: Tensor) -> None:
            some_g, some_u = keep_good(good, g), keep_good(good, u)
            for some in slices(len(c), TOGETHER):
                scaled = some_g[some].to(c.dtype) * c[some, None]
                view.addmm_(scaled.t(), some_u[some].to(c.dtype))

        return Part(squares, add)

    def by_gram(self, table: "Lookup | None" = None) -> Part:
        """‖G‖² = Σ_tt' (u_t·u_t')(g_t·g_t'), and the product, both in float64.

        table: look-ups in the same weight, in rows where the product has zeros.
        """
        g, u = self.g.double(), self.u.double()
        uu, gg = u @ u.mT, g @ g.mT
        lengths = (uu.diagonal(0, 1, 2) * gg.diagonal(0, 1, 2)).sqrt().sum(1)
        # Of positions that all but cancel the Gram sum is rounding, and no norm to divide by.
        squares = torch.maximum((uu * gg).sum((1, 2)), (FLOOR * lengths).square())
        if table is not None:
            squares = squares + table.squares()

        def add(c: Tensor, good: Tensor | None, view: Tensor) -> None:
            read = keep_good(good, u)
            # A few rows at a time: the system would clear a new large matrix first.
            for rows in norms.chunks(len(view), 8 * view[0].numel(), view, len(view)):
                scaled = keep_good(good, g[:, :, rows]) * c.double()[:, None, None]
                total = g.new_zeros(view[rows].shape)
                for some in slices(len(c), max(1, _TERMS // self.length)):
                    total.addmm_(scaled[some].flatten(0, 1).t(), read[some].flatten(0, 1))
                if table is not None:
                    table.add_to(total, rows.start, c, good)
                view[rows] += total.to(view.dtype)

        return Part(squares, add)

    def beside(self, table: "Lookup") -> Part | None:
        """Together with look-ups in the same table, as in an output layer tied to the embedding.

        The product's rows at a record's look-ups are moved to the looked-up part. The two parts
        then have no entry in common, so their squares add up.
        """
        # Sooner than alone: a table for each record would cost more than a matrix.
        if not is_few(self.g, self.length, self.size, self.u.shape[2], least=2):
            return None
        index, rows = table.distinct()
        at = index[:, None].expand(-1, self.length, -1)
        # Unused places repeat the last index, whose row must not count twice.
        first = torch.cat([index.new_ones(len(index), 1), index.diff(dim=1)], 1) > 0
        read = self.g.gather(2, at) * first[:, None]
        product = Outer(self.g.double().scatter_(2, at, 0), self.u)
        looked_up = Lookup(index, rows + read.mT @ self.u, table.entries, None)
        return product.by_gram(looked_up)


class Lookup(Share):
    """Rows of a table [V, E]: row i is Σ of g_t over the positions t that hold the index i.

    index: [B, T]. g: [B, T, E]. padding: an index whose row has no gradient.
    """

    def __init__(self, index: Tensor, g: Tensor, entries: int, padding: int | None) -> None:
        self._index, self.entries = index.long(), entries
        self._g = g if padding is None else torch.where((index != padding)[:, :, None], g, 0)
        super().__init__(len(g), entries * g.shape[2], g)

    def quick_rows(self, chunk: slice) -> Tensor:
        """See Share."""
        index, g = self._index[chunk], self._g[chunk]
        table = g.new_zeros(len(g), self.entries, g.shape[2])
        place = index[:, :, None].expand_as(g)
        return table.scatter_add_(1, place, g).flatten(1)

    def minus(self, other: Share) -> list[Share]:
        """See Share."""
        if isinstance(other, Lookup) and same(self._index, other._index):
            return [Lookup(self._index, self._g - other._g, self.entries, None)]
        return super().minus(other)

    def factors(self) -> list[Tensor]:
        """See Share."""
        return [self._g]

    def distinct(self) -> tuple[Tensor, Tensor]:
        """Indices [B, T] that do not fall, and rows [B, T, E]: those of a record, each index once.

        A row holds the sum over all positions of its index. Behind a record's last index, which it
        repeats, rows are 0.
        """
        index, g = self._index, self._g
        if index.shape[1] > 1:
            # Sort each record's indices, so that runs of equal ones can be summed.
            order = index.argsort(stable=True, dim=1)
            index = index.gather(1, order)
            g = g.gather(1, order[:, :, None].expand_as(g))
            first = torch.cat([torch.ones_like(index[:, :1]), index.diff(dim=1)], 1) != 0
            # Row of its run of equal indices, to which each position is added.
            run = first.long().cumsum(1) - 1
            g = torch.zeros_like(g).scatter_add_(1, run[:, :, None].expand_as(g), g)
            index = index[:, -1:].repeat(1, index.shape[1]).scatter_(1, run, index)
        return index, g

    def special(self) -> Part | None:
        """One row for each pair (record, index) that occurs, unless a table is no larger than g."""
        if self.size <= self._g[0].numel():
            return None
        index, g = self.distinct()
        squares = square_sums(g)

        def add(c: Tensor, good: Tensor | None, view: Tensor) -> None:
            some_g = keep_good(good, g)
            for some in slices(len(c), TOGETHER):
                scaled = some_g[some].to(c.dtype) * c[some, None, None]
                at, rows = index[some].flatten(), scaled.flatten(0, 1)
                # Summed first: added to a large total, each term would be rounded again.
                if len(at) < self.entries == len(view):
                    at, rows = (v[0] for v in Lookup(at[None], rows[None], 0, None).distinct())
                    view.index_add_(0, at, rows.view(-1, *view.shape[1:]))
                    continue
                own = view.new_zeros(self.entries, self.size // self.entries)
                view.add_(own.index_add_(0, at, rows).view(view.shape))

        return Part(squares, add)

    def squares(self) -> Tensor:
        """‖row‖² over the rows of `distinct`, [B] in float64."""
        return square_sums(self._g)

    def add_to(self, total: Tensor, first: int, c: Tensor, good: Tensor | None) -> None:
        """Add Σ_j c_j g_j to a table's rows [n, E] from `first` on. Of distinct look-ups."""
        at = self._index.flatten() - first
        here = torch.logical_and(at >= 0, at < len(total))
        scaled = (keep_good(good, self._g).to(c.dtype) * c[:, None, None]).flatten(0, 1)
        rows = scaled.to(total.dtype) * here[:, None]
        total.index_add_(0, at.clamp(0, len(total) - 1), rows)


class SumOfShares(Share):
    """Several shares of one parameter."""

    def __init__(self, shares: list[Share]) -> None:
        most = min(share.most for share in shares)
        super().__init__(shares[0].batch, shares[0].size, shares[0].like, most)
        self.shares = shares

    def quick_rows(self, chunk: slice) -> Tensor:
        """See Share."""
        total = self.shares[0].rows(chunk)
        for share in self.shares[1:]:
            total = total + share.rows(chunk)
        return total

    def special(self) -> Part | None:
        """See Share: of an output layer that is the embedding."""
        if len(self.shares) != 2:
            return None
        for one, other in (self.shares, self.shares[::-1]):
            if isinstance(one, Outer) and isinstance(other, Lookup):
                return one.beside(other)
        return None


def sum_of(shares: list[Share]) -> Share:
    """The share of a sum of shares."""
    if len(shares) == 1:
        return shares[0]
    outers = [share for share in shares if isinstance(share, Outer)]
    if len(outers) > 1:
        one = Outer(torch.cat([s.g for s in outers], 1), torch.cat([s.u for s in outers], 1))
        return sum_of([one, *(s for s in shares if not isinstance(s, Outer))])
    return SumOfShares(shares)
