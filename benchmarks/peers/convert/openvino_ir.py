"""A checkpoint as OpenVINO IR: python -m benchmarks.peers.convert.openvino_ir CHECKPOINT FOLDER PRECISION.

PRECISION: float32 or int8; in the precision that the exporter chooses, "default", and for an encoder "embedding".
Needs optimum-intel (and nncf, which makes the int8 weights: 8 bits, per channel).
"""

from __future__ import annotations

import sys
from pathlib import Path

from optimum.intel import OVModelForCausalLM, OVModelForFeatureExtraction, OVWeightQuantizationConfig


def convert(checkpoint: Path, folder: Path, precision: str) -> None:
    if precision == "embedding":
        OVModelForFeatureExtraction.from_pretrained(
            checkpoint, export=True, compile=False, trust_remote_code=False
        ).save_pretrained(folder)
        _convert_tokenizer(checkpoint, folder)
        return
    quantization = OVWeightQuantizationConfig(bits=8) if precision == "int8" else None
    model = OVModelForCausalLM.from_pretrained(
        checkpoint,
        export=True,
        compile=False,
        load_in_8bit=None if precision == "default" else False,
        quantization_config=quantization,
        trust_remote_code=False,
    )
    model.save_pretrained(folder)
    _convert_tokenizer(checkpoint, folder)


def _convert_tokenizer(checkpoint: Path, folder: Path) -> None:
    """The pipeline refuses a folder without one, even for prompts of token ids."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    tokenizer, detokenizer = convert_tokenizer(read, with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
