"""Processor of Pixtral and Mistral 3: an image is rows of tokens, with a token after each row.

Agrawal et al. 2024, https://arxiv.org/abs/2410.07073, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PixtralProcessor:
    """The image processor of Transformers, and the text of an image.

    fields: of processor_config.json.
    """

    def __init__(self, parts: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self.tokenizer, self.image_processor = parts["tokenizer"], parts["image_processor"]
        self._square = int(fields.get("patch_size", 16)) * int(fields.get("spatial_merge_size", 1))
        self.image_token = str(fields.get("image_token", "[IMG]"))
        self._break = str(fields.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(fields.get("image_end_token", "[IMG_END]"))

    def __call__(self, text: Sequence[str], images: Sequence[Any] = (), *, return_tensors: str, **options: Any) -> Any:
        """Tokens of texts, of which each placeholder becomes the next image's, and what the encoder takes."""
        options = {"patch_size": self._square, **options}
        made = self.image_processor(list(images), return_tensors=return_tensors, **options) if images else {}
        sizes = iter(made.get("image_sizes", ()))
        expanded = []
        for one in text:
            first, *others = one.split(self.image_token)
            expanded.append(first + "".join(self._tokens(*next(sizes)) + other for other in others))
        return {**self.tokenizer(expanded, return_tensors=return_tensors), **made}

    def _tokens(self, height: Any, width: Any) -> str:
        """Tokens of an image of this size in pixels."""
        row = self.image_token * (int(width) // self._square) + self._break
        rows = row * (int(height) // self._square)
        return rows.removesuffix(self._break) + self._end
