"""Given features: tensors of callers and of files are read as they are, and everything else is refused by name."""

from __future__ import annotations

import base64
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import InvalidRequest
from penstock.media.features import rows_of
from support.multimodal_models import saved_tensor


class _OfTensor:
    """A tensor whose storage is said to be another tensor, with more rows than bytes."""

    def __reduce__(self) -> Any:
        few = torch.zeros(1, 1).expand(96, 1)
        return torch._utils._rebuild_tensor_v2, (few, 0, (96, 1), (1, 1), False, OrderedDict())


_SPARSE = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([1.0]), (4, 64), check_invariants=False)
REFUSED: list[tuple[Any, str]] = [
    (torch.zeros(4, 48), r"prompt_embeds has the shape \[4, 48\]. Allowed: \[tokens, 64\]"),
    (torch.zeros(64), r"shape \[64\]"),
    (torch.zeros(2, 3, 64), r"shape \[2, 3, 64\]"),
    (torch.zeros(0, 64), r"shape \[0, 64\]"),
    (torch.zeros(4, 64, dtype=torch.int64), "dtype int64. Allowed: float32, bfloat16, float16"),
    (torch.full((4, 64), float("nan")), "not finite"),
    ([[0.0] * 64], "prompt_embeds is a list"),
    ("?", "not base64"),
    (base64.b64encode(b"bytes").decode(), "not a zip archive"),
    (saved_tensor(torch.zeros(4, 64), _use_new_zipfile_serialization=False), "not a zip archive"),
    (saved_tensor({"rows": torch.zeros(4, 64)}), "holds a dict. Allowed: a tensor"),
    (saved_tensor(np.zeros((4, 64))), "it names numpy"),
    (saved_tensor(_SPARSE), "it names torch._utils._rebuild_sparse_tensor"),
    (saved_tensor(_OfTensor()), "its values are not a storage of it"),
    (saved_tensor([torch.zeros(4, 64), torch.ones(4, 64)]), "it has several storages"),
    (saved_tensor(torch.zeros(4, 64, dtype=torch.int64)), "dtype int64"),
    (saved_tensor(torch.zeros(4, 64, dtype=torch.float64)), "it names torch.DoubleStorage"),
    (saved_tensor(torch.zeros(1, 64).expand(10**9, 64)), "Allowed: 1 to 96 rows"),
    (saved_tensor(torch.zeros(4, 64))[:-400], "not a saved tensor"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_is_not_rows_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        rows_of("prompt_embeds", given, 64, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_saved_tensors_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    whole = torch.randn(3, 20, 64).to(dtype)
    for rows in (whole[0], whole[1, 2:7], whole[:, :, 3].T.contiguous().T, whole[0].requires_grad_()):
        read = rows_of("prompt_embeds", saved_tensor(rows), rows.shape[-1], 96)
        assert np.array_equal(read.astype(np.float32), rows.detach().float().numpy())
        assert np.array_equal(read, rows_of("prompt_embeds", rows, rows.shape[-1], 96))
