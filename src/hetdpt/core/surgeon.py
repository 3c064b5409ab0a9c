"""The order in which a linear layer can lose its inputs, by the optimal brain surgeon. Knows no model.

Hassibi and Stork (1993) for whole columns, as in ZipLM (Kurtic et al., 2023): the input is removed next that is missed
least once the others have taken over, in closed form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hetdpt.core.fold import exact

BLOCK = 64  # inputs that are removed before the large matrices are updated
RIDGE = 1e-6  # of the mean second moment; so that inputs that are constant or depend on others can be removed


class Removals(NamedTuple):
    """All groups of inputs of a layer in the order in which they are removed."""

    order: Tensor
    """(groups,): numbers of groups, the one that is missed least first."""
    errors: Tensor
    """(groups,): squared error of the output after each removal, the remaining inputs refitted."""


@torch.no_grad()
def order_removals(weight: Tensor, moments: Tensor, groups: Tensor, ridge: float = RIDGE) -> Removals:
    """Return the order in which y = W x loses groups of its inputs, and the error for every width, in one pass.

    With C = G^-1 of the second ``moments`` G = E x x^T, the next group g is that of the least tr(W_g C_gg^-1 W_g^T),
    which is what its removal adds to E || y - W' x ||^2. Then W -= W_g C_gg^-1 C_g and C -= C_g^T C_gg^-1 C_g. For a
    layer with a bias G is centred. ``groups`` (groups, size) are indices of inputs that are removed together. Inputs in
    no group are never removed: with W = 0 they are a linear bypass that is fitted as features are removed.

    >>> weight, moments = torch.tensor([[1.0, 3.0, 2.0]]), torch.eye(3)
    >>> order_removals(weight, moments, torch.arange(3)[:, None], ridge=0.0)
    Removals(order=tensor([0, 2, 1]), errors=tensor([ 1.,  5., 14.], dtype=torch.float64))
    """
    moments = exact(moments)
    state = _Removal(exact(weight), moments, groups.to(moments.device), ridge)
    steps = [state.remove() for _ in range(len(groups))]
    order, costs = zip(*steps, strict=True) if steps else ((), ())
    return Removals(torch.tensor(order, dtype=torch.long), torch.tensor(costs, dtype=torch.float64).cumsum(0))


class _Removal:
    """A layer that loses its inputs one group at a time.

    W and C are updated once for ``BLOCK`` inputs, by the sums of products V U and U^T U; in between only what the costs
    of the groups depend on is up to date: their blocks of C and of W^T W.
    """

    def __init__(self, weight: Tensor, moments: Tensor, groups: Tensor, ridge: float) -> None:
        damping = ridge * moments.diagonal().mean().clamp(min=torch.finfo(moments.dtype).tiny)
        damped = moments + damping * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        self.weight, self.inverse = weight, torch.cholesky_inverse(torch.linalg.cholesky(damped))
        self.groups, self.numbers = groups, torch.arange(len(groups), device=groups.device)
        self._restart()

    def _restart(self) -> None:
        """Read off what the costs depend on, with nothing removed since W and C were updated."""
        self.u, self.v = self.inverse[:0], self.weight[:, :0]
        self.blocks = self.inverse[self.groups[:, :, None], self.groups[:, None]]  # (groups, size, size)
        columns = self.weight.T[self.groups]  # (groups, size, outputs)
        self.products = columns @ columns.mT
        self.is_left = torch.ones(len(self.groups), dtype=torch.bool, device=self.groups.device)

    def remove(self) -> tuple[int, float]:
        """Remove the group that costs least; return its number and that cost."""
        if self.u.shape[0] >= BLOCK:
            self._update()
        costs = _traces(self.products, self.blocks).where(self.is_left, torch.inf)
        best = int(costs.argmin())
        group = self.groups[best]
        factor = torch.linalg.cholesky(self.blocks[best])
        rows = self.inverse[group] - self.u[:, group].T @ self.u  # (size, inputs), C_g as it is now
        columns = self.weight[:, group] - self.v @ self.u[:, group]  # (outputs, size)
        u = torch.linalg.solve_triangular(factor, rows, upper=False)
        v = torch.linalg.solve_triangular(factor, columns.T, upper=False).T
        self._add(u, v)
        self.is_left[best] = False
        return int(self.numbers[best]), v.square().sum().item()

    def _add(self, u: Tensor, v: Tensor) -> None:
        """Apply C -= U^T U and W -= V U to the blocks of the groups."""
        of_groups = u.T[self.groups]  # (groups, size, k)
        crossed = (v.T @ self.weight - (v.T @ self.v) @ self.u).T[self.groups]  # V^T W
        mixed = of_groups @ crossed.mT
        self.blocks = self.blocks - of_groups @ of_groups.mT
        self.products = self.products - mixed - mixed.mT + of_groups @ (v.T @ v) @ of_groups.mT
        self.u, self.v = torch.cat([self.u, u]), torch.cat([self.v, v], 1)

    def _update(self) -> None:
        """Bring W and C up to date, without the inputs that were removed."""
        gone = self.groups[~self.is_left].flatten()
        stays = torch.ones(len(self.inverse), dtype=torch.bool, device=gone.device).index_fill(0, gone, False)
        u = self.u[:, stays]
        self.inverse = self.inverse[stays][:, stays] - u.T @ u
        self.weight = self.weight[:, stays] - self.v @ u
        self.groups, self.numbers = (stays.cumsum(0) - 1)[self.groups[self.is_left]], self.numbers[self.is_left]
        self._restart()


def _traces(products: Tensor, blocks: Tensor) -> Tensor:
    """Return tr(A B^-1) for each of the (groups, size, size) ``products`` A and ``blocks`` B."""
    if blocks.shape[-1] == 1:
        return (products / blocks).flatten()
    factors, _ = torch.linalg.cholesky_ex(blocks)  # groups that were removed have none
    return torch.cholesky_solve(products, factors).diagonal(dim1=-2, dim2=-1).sum(-1)
