"""Meta tensors from the headers of safetensors files, local ones and those of a hub id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.device.operator_sizes import META
from penstock.errors import CheckpointError, ModelNotFound

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def fetch_headers(model: str, revision: str | None) -> list[tuple[str, Tensor]]:
    """Fetch the safetensors headers of a hub id; return meta tensors by name.

    Raises CheckpointError without such files, or for an unknown dtype, ModelNotFound if the hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:
        metadata = HfApi().get_safetensors_metadata(model, revision=revision)
    except NotASafetensorsRepoError as error:
        raise CheckpointError(
            f"model={model!r} has no safetensors files on the hub, and the headers of others cannot be fetched by "
            "themselves. Download it, and plan for the folder."
        ) from error
    except (HfHubHTTPError, SafetensorsParsingError, OSError) as error:
        raise ModelNotFound(f"model={model!r}: the headers of its weights cannot be fetched: {error}") from error
    return [
        (name, meta_tensor(name, str(tensor.dtype), tensor.shape))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    ]


def meta_tensor(name: str, dtype: str, shape: Sequence[int]) -> Tensor:
    """Return a meta tensor of a header's entry, with its dtype as safetensors names it.

    Raises CheckpointError, naming the tensor, for an unknown dtype.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"The tensor {name} has the dtype {dtype}, which cannot be loaded.")
    return torch.empty(tuple(shape), dtype=_DTYPES[dtype], device=META)
