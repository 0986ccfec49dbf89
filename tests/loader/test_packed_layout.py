"""Bytes of packed weights: those that states on disk have until `LAYOUT_VERSION` rises."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.native import available_instruction_sets, load_native_kernels
from penstock.kernels.native.bfloat16_layout import Bfloat16Layout
from penstock.kernels.native.quantized import available_quantized_products
from penstock.kernels.quantized import QuantizedProducts, QuantizedShape, QuantizedWeight, TorchQuantizedProducts
from penstock.loader.packed_header import LAYOUT_VERSION

# Whole panels of every width, so that no byte is padding.
OUTPUTS, INPUTS = 128, 128
# Forms of quantised weights: bits, group size, whether with minimums, bytes of a scale.
FORMS = {
    "int8": (8, INPUTS, False, 4),
    "int8 in groups": (8, 32, True, 2),
    "int4": (4, 32, True, 2),
    "int4 in halves": (4, 16, True, 2),
    "e2m1": (4, 32, False, 1),
}
# SHA-256 of the packed bytes, shortened, by layout and form. Layouts are named by what they depend on, so that all
# processors with one agree. Where a digest changes, states and caches of packed weights that were written before have
# other bytes than the kernels read: raise LAYOUT_VERSION, and write the new digests.
DIGESTS = {
    ("panels of 32", "float32"): "401eda0ada087cf9",
    ("panels of 32", "bfloat16"): "ad324343c8a90b6c",
    ("panels of 32", "float16"): "5b26408f5da911c1",
    ("panels of 32", "bfloat16 pairs"): "c6b788f1bca1820c",
    ("tiles", "bfloat16 tiles"): "0db47a24e76483c1",
    ("panels of 16", "float32"): "d8a631b9ff5fae9f",
    ("panels of 16", "bfloat16"): "5c37408ea3537b54",
    ("panels of 16", "float16"): "127dddbf7c35b486",
    ("panels of 16", "bfloat16 pairs"): "77870b0db97d5006",
    ("panels of 8", "float32"): "830d28950c96825f",
    ("panels of 8", "bfloat16"): "92bd75c7118a01f7",
    ("panels of 8", "float16"): "898c5b747a8fdbd4",
    ("panels of 8", "bfloat16 pairs"): "30815ab088716a11",
    ("avx512vnni", "int8"): "04d9ee4e17401937",
    ("avx512vnni", "int8 in groups"): "a51b81d6e1077890",
    ("avx512vnni", "int4"): "1e9867785dbc356f",
    ("avx512vnni", "int4 in halves"): "45f07cf6fb8a3f65",
    ("avx512vnni", "e2m1"): "975d57613a6e62b4",
    ("avx512", "int8"): "086404bead1c3230",
    ("avx512", "int8 in groups"): "a51b81d6e1077890",
    ("avx512", "int4"): "1e9867785dbc356f",
    ("avx512", "int4 in halves"): "45f07cf6fb8a3f65",
    ("avx512", "e2m1"): "975d57613a6e62b4",
    ("avx2", "int8"): "eee5e8acf38b99b5",
    ("avx2", "int8 in groups"): "7fcd874d6e918f77",
    ("avx2", "int4"): "17f27a25788a4a93",
    ("avx2", "int4 in halves"): "e7f0a0507e17abe6",
    ("avx2", "e2m1"): "e374c9cd5a4daf3e",
    ("generic", "int8"): "7bdb1b4a4dbe4911",
    ("generic", "int8 in groups"): "3412c774eb841393",
    ("generic", "int4"): "307b3c739f03c137",
    ("generic", "int4 in halves"): "472ff3709e7b998e",
    ("generic", "e2m1"): "ac3e17bf844708cb",
    ("torch", "int8"): "573b865488d44b90",
    ("torch", "int8 in groups"): "beb04bae9a7131b4",
    ("torch", "int4"): "069285b753ff23d6",
    ("torch", "int4 in halves"): "517ece3088f21507",
    ("torch", "e2m1"): "05f38bfae98c144a",
}


def test_digests_are_of_this_version() -> None:
    assert LAYOUT_VERSION == 1


def digest(packed: Tensor) -> str:
    data = packed.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def floats(dtype: torch.dtype) -> Tensor:
    values = torch.arange(OUTPUTS * INPUTS, dtype=torch.float32).view(OUTPUTS, INPUTS)
    return ((values * 7 % 251) / 16).to(dtype)


def quantized(form: str) -> QuantizedWeight:
    bits, group_size, has_minimums, scale_bytes = FORMS[form]
    shape = QuantizedShape(bits, OUTPUTS, INPUTS, group_size, has_minimums, scale_bytes)
    numbers = torch.arange(OUTPUTS * INPUTS).view(OUTPUTS, INPUTS) * 5 % 253
    values = numbers % 16 if bits == 4 else numbers % 128 if has_minimums else numbers - 126
    if shape.is_e2m1:
        values = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])[values]
    groups = torch.arange(OUTPUTS * shape.num_groups, dtype=torch.float32).view(OUTPUTS, shape.num_groups)
    scales = (groups % 8).exp2() if scale_bytes == 1 else (groups % 31 + 1) / 32
    return QuantizedWeight(shape, values.to(torch.int8), scales, -groups % 17 / 16 if has_minimums else None)


def float_cases() -> dict[tuple[str, str], Callable[[], Tensor]]:
    cases: dict[tuple[str, str], Callable[[], Tensor]] = {}
    for found in available_instruction_sets():
        kernels = load_native_kernels(found.name)
        assert kernels is not None
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = f"panels of {found.panel_width}", str(dtype).removeprefix("torch.")
            cases[name] = lambda kernels=kernels, dtype=dtype: kernels.pack_weight(floats(dtype))  # type: ignore[misc]
        for layout in Bfloat16Layout:
            where = "tiles" if layout is Bfloat16Layout.TILES else f"panels of {found.panel_width}"
            cases[where, f"bfloat16 {layout.name.lower()}"] = (
                lambda kernels=kernels, layout=layout: kernels.pack_weight(floats(torch.bfloat16), bfloat16=layout)  # type: ignore[misc]
            )
    return cases


def quantized_cases() -> dict[tuple[str, str], Callable[[], Tensor]]:
    products: dict[str, QuantizedProducts] = {one.name: one for one in available_quantized_products()}
    products["torch"] = TorchQuantizedProducts()
    return {
        (name, form): lambda one=one, form=form: one.pack(quantized(form))  # type: ignore[misc]
        for name, one in products.items()
        for form in FORMS
    }


CASES = {**float_cases(), **quantized_cases()}


@pytest.mark.processor
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_packed_bytes_are_those_of_the_layouts_version(case: tuple[str, str]) -> None:
    if case not in DIGESTS:
        pytest.skip("no machine with this layout has written its digest yet")
    assert digest(CASES[case]()) == DIGESTS[case]
