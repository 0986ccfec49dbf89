"""Processors that are put together from a model's files make what Transformers' and the papers' rules say."""

from __future__ import annotations

from pathlib import Path

from penstock.features.multimodal.inputs.processor import read_processor
from support.multimodal_models import picture, save_tokenizer, write_processor


def test_an_image_of_pixtral_is_rows_of_tokens_that_end_with_a_break(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    write_processor(tmp_path, "mistral3")
    processor = read_processor(tmp_path, "mistral3")
    # Two images: 48 x 20 pixels are made 32 x 13, then whole squares of 8; 5 x 9 become 8 x 16.
    made = processor(text=["w1 <image> w2 <image>"], images=[picture(48, 20), picture(5, 9)], return_tensors="pt")
    assert made["image_sizes"].tolist() == [[16, 32], [16, 8]]
    rows = "<image>" * 4 + "[IMG_BREAK]" + "<image>" * 4 + "<vision_end>"
    expected = f"w1 {rows} w2 <image>[IMG_BREAK]<image><vision_end>"
    assert made["input_ids"].tolist() == processor.tokenizer([expected])["input_ids"]
