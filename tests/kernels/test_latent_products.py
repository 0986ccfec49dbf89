"""C++ products between heads and latents against their definition; a row has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.latent import absorb, expand
from penstock.kernels.native import load_native_kernels
from penstock.kernels.native.latent_shape import LatentShape
from support.instruction_sets import AVAILABLE, needs_native_kernels

pytestmark = needs_native_kernels
SHAPES = [LatentShape(4, 12, 8, 24, 20, True), LatentShape(3, 16, 4, 64, 32, False)]


@pytest.mark.parametrize("instruction_set", AVAILABLE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_equal_their_definition(instruction_set: str, shape: LatentShape, dtype: torch.dtype) -> None:
    kernels = load_native_kernels(instruction_set)
    assert kernels is not None
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    keys_HNC = random(shape.num_heads, shape.nope_size, shape.latent_size).to(dtype)
    values_HVC = random(shape.num_heads, shape.value_size, shape.latent_size).to(dtype)
    query_TX, rows_TY = random(50, shape.num_heads * shape.query_size + 3), random(50, 10 + shape.key_size)
    latent_TX, norm_C = random(50, shape.num_heads * shape.latent_size), random(shape.latent_size)
    keys = kernels.pack_head_weights(keys_HNC.transpose(1, 2))
    values = kernels.pack_head_weights(values_HVC)
    absorbed = kernels.absorb(query_TX, rows_TY, keys, norm_C, 1e-6, shape)
    torch.testing.assert_close(absorbed, absorb(query_TX, rows_TY, keys_HNC, norm_C, 1e-6, shape), rtol=0, atol=1e-4)
    expanded = kernels.head_products(latent_TX, values, shape.num_heads, shape.value_size)
    torch.testing.assert_close(expanded, expand(latent_TX, values_HVC), rtol=0, atol=1e-4)
    for rows in (slice(7, 8), slice(20, 45)):
        part = kernels.absorb(query_TX[rows], rows_TY[rows], keys, norm_C, 1e-6, shape)
        assert torch.equal(part, absorbed[rows])
        part = kernels.head_products(latent_TX[rows], values, shape.num_heads, shape.value_size)
        assert torch.equal(part, expanded[rows])
    unpacked = kernels.unpack_head_weights(keys, shape.num_heads, shape.latent_size)
    assert torch.equal(unpacked.transpose(1, 2), keys_HNC)
