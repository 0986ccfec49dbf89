"""Images of prompts: decoded, upright, and in RGB.

Transparent pixels are blended with a background, white by default, as vLLM's are. An animation gives its first frame.
"""

from __future__ import annotations

import io
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.param_checks import shown
from penstock.errors import InvalidMedia
from penstock.media.item import package
from penstock.media.options import ImageOptions

if TYPE_CHECKING:
    from PIL import Image

# Formats whose decoders are in PIL itself; others, such as EPS, start programs.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
_CHANNELS = (1, 3, 4)


def read_image(given: Any, options: ImageOptions) -> Image.Image:
    """RGB copy of an image of PIL, of a file's content, or of an array [H, W], [H, W, C] or [C, H, W]: uint8, or floats
    of 0 to 1.

    Its size is checked before its pixels are decoded. Raises InvalidMedia.
    """
    library = package("PIL.Image", "Images", "multimodal")
    library.init()
    formats = [name for name in _FORMATS if name in library.OPEN]
    try:
        if isinstance(given, bytes):
            image = library.open(io.BytesIO(given), formats=formats)
        else:
            image = given if isinstance(given, library.Image) else library.fromarray(_pixels(given))
        options.check(*image.size)
        made = _upright_rgb(image, options)
        # The caller's image may change meanwhile.
        return made.copy() if made is given else made
    except InvalidMedia:
        raise
    except library.DecompressionBombError:
        most = min(options.max_pixels, 2 * library.MAX_IMAGE_PIXELS)
        raise InvalidMedia(f"It has more pixels than PIL opens. Allowed: up to {most:,} in all.") from None
    except library.UnidentifiedImageError:
        raise InvalidMedia(f"It is not an image that can be read. Allowed: {', '.join(formats)}.") from None
    except Exception as error:  # decoders raise many kinds for damaged files
        raise InvalidMedia(f"It is a damaged image: {error or type(error).__name__}."[:300]) from None


def _upright_rgb(image: Image.Image, options: ImageOptions) -> Image.Image:
    from PIL import ExifTags, Image, ImageOps

    image.load()
    # Damaged metadata leave the image as it is. One that is upright is not copied.
    with suppress(Exception):
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Gray of 16 bits, which PIL itself would clip.
        values = np.clip(np.asarray(image), 0, 0xFFFF)
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if _has_alpha(image):
        seen = image.convert("RGBA")
        behind = Image.new("RGB", seen.size, options.rgba_background_color)
        behind.paste(seen, mask=seen.getchannel("A"))
        return behind
    return image if image.mode == "RGB" else image.convert("RGB")


def _has_alpha(image: Image.Image) -> bool:
    if image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A"):
        return True
    return image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info


def _pixels(given: Any) -> NDArray[np.uint8]:
    """Array [H, W] or [H, W, 3 or 4] of what an array or a tensor of any library has."""
    try:
        values = np.asarray(given)
    except Exception:  # a tensor of a device
        values = np.empty(0, dtype=object)
    if values.ndim == 3 and values.shape[-1] not in _CHANNELS and values.shape[0] in _CHANNELS:
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.size and (values.ndim == 2 or (values.ndim == 3 and values.shape[-1] in _CHANNELS)):
        if values.dtype == np.uint8:
            return np.ascontiguousarray(values)
        if values.dtype.kind == "f" and bool(((values >= 0) & (values <= 1)).all()):
            return np.asarray(np.rint(values * 255), np.uint8)
    is_array = bool(values.ndim and values.size)
    shape = f"a {type(given).__name__} of shape {list(values.shape)} and {values.dtype}"
    raise InvalidMedia(
        f"It is {shape if is_array else shown(given)}. Allowed: an image of PIL, an array [H, W], [H, W, C] or "
        "[C, H, W] of uint8 or of floats from 0 to 1, bytes, a path or a URL."
    )
