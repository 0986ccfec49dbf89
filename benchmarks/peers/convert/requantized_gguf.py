"""A GGUF file in another quantisation, by llama.cpp: requantized_gguf FILE OUTPUT Q8_0|Q4_K_M."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp


def convert(source: str, target: str, name: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.allow_requantize = True
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if code != 0:
        raise SystemExit(f"llama_model_quantize returned {code}")


if __name__ == "__main__":
    convert(*sys.argv[1:])
