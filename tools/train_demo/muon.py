"""Muon: momentum whose update is made orthogonal, for the matrices inside the model.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). torch has one too, but
it computes in bfloat16, which most CPUs do very slowly; this one stays in float32 and handles equal shapes together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(matrices_NRC: Tensor) -> Tensor:
    """Roughly U V^T for each matrix U S V^T of the batch [N, rows, columns], by Newton-Schulz iteration.

    One step is X' = P X with P = aI + bG + cG² and G = X X^T. G and P commute, so G' = P G P, and the product of all P
    can be formed from small square matrices before it meets X: half the work of iterating on X.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x: Tensor = matrices_NRC.mT if tall else matrices_NRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    gram = x @ x.mT
    identity = torch.eye(x.shape[1])
    product = identity
    for _ in range(NEWTON_SCHULZ_STEPS):
        polynomial = a * identity + torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        product = polynomial @ product
        gram = polynomial @ gram @ polynomial
    x = product @ x
    return x.mT if tall else x


class Muon:
    """Nesterov momentum, orthogonalised, scaled so that the step does not depend on a matrix's shape."""

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self.groups = list(by_shape.values())
        self.velocities = [torch.zeros(len(group), *group[0].shape) for group in self.groups]
        self.momentum = momentum
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every matrix from its gradient, then drop the gradients."""
        for group, velocity in zip(self.groups, self.velocities, strict=True):
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            velocity.lerp_(gradients, 1 - self.momentum)
            updates = orthogonalised(gradients.lerp(velocity, self.momentum))
            scale = max(1.0, updates.shape[1] / updates.shape[2]) ** 0.5
            for matrix, update in zip(group, updates, strict=True):
                matrix.mul_(1 - lr * self.weight_decay).add_(update, alpha=-lr * scale)
                matrix.grad = None
