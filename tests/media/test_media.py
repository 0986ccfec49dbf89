"""Images, audio and video are decoded as PIL, scipy, soundfile and av do, within limits that are checked before."""

from __future__ import annotations

import base64
import io
import re
import struct
import sys
import wave
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image
from scipy.signal import resample_poly

from penstock.errors import ConfigError, InvalidMedia, UnsupportedParameter
from penstock.media.audio import resampled
from penstock.media.item import Media
from penstock.media.loader import MediaLoader
from penstock.media.options import MediaOptions

LOADER = MediaLoader()
GRADIENT = np.stack(np.meshgrid(np.arange(0, 240, 5), np.arange(0, 160, 5)), axis=-1).astype(np.uint8)
PIXELS = np.dstack([GRADIENT, np.full(GRADIENT.shape[:2], 77, np.uint8)])


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def load(modality: str, given: Any, options: dict[str, Any] | None = None) -> Media:
    loader = LOADER if options is None else MediaLoader(options=MediaOptions.read(options))
    return loader.load(modality, given, "messages[0].content[1]")


def pixels_of(given: Any) -> np.ndarray[Any, Any]:
    image = load("image", given).value
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "PPM"])
def test_a_lossless_image_keeps_its_pixels_from_any_source(tmp_path: Path, kind: str) -> None:
    content = encoded(Image.fromarray(PIXELS), kind, **({"lossless": True} if kind == "WEBP" else {}))
    (tmp_path / "image").write_bytes(content)
    url = f"data:image/x;base64,{base64.b64encode(content).decode()}"
    files = [content, bytearray(content), url, tmp_path / "image"]
    for sources in (files, [Image.open(io.BytesIO(content)), PIXELS]):
        for given in sources:
            np.testing.assert_array_equal(pixels_of(given), PIXELS)
        assert len({load("image", given).content_hash() for given in sources}) == 1


def test_an_image_of_the_caller_may_change_afterwards() -> None:
    given = Image.fromarray(PIXELS)
    loaded = load("image", given)
    given.putpixel((0, 0), (1, 2, 3))
    np.testing.assert_array_equal(np.asarray(loaded.value), PIXELS)


def test_arrays_of_any_usual_form_are_images() -> None:
    for given in (PIXELS, PIXELS.transpose(2, 0, 1), PIXELS / 255, (PIXELS / 255).astype(np.float32)):
        np.testing.assert_array_equal(pixels_of(given), PIXELS)
    gray = PIXELS[..., :1]
    for given in (gray, gray[..., 0], gray.transpose(2, 0, 1)):
        np.testing.assert_array_equal(pixels_of(given), np.repeat(gray, 3, axis=2))


def test_the_content_hash_tells_contents_of_one_size_apart() -> None:
    images = [PIXELS, 255 - PIXELS, PIXELS.reshape(48, 32, 3)]
    files = [encoded(Image.fromarray(image)) for image in images]
    assert len({load("image", image).content_hash() for image in [*images, *files]}) == 6
    details = {LOADER.load("image", files[0], "image", detail=detail).content_hash() for detail in ("low", "high")}
    assert len(details) == 2
    sounds = [(np.zeros(9), 8000), (np.zeros(9), 16000), (np.zeros(8), 8000), (np.ones(9), 8000)]
    assert len({load("audio", sound).content_hash() for sound in sounds}) == 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = {1: PIXELS, 2: PIXELS[:, ::-1], 3: PIXELS[::-1, ::-1], 4: PIXELS[::-1], 5: PIXELS.transpose(1, 0, 2)}
    turned |= {6: np.rot90(PIXELS, -1), 7: PIXELS[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(PIXELS)}
    content = encoded(Image.fromarray(PIXELS), exif=exif)
    np.testing.assert_array_equal(pixels_of(content), turned[orientation])


def test_transparent_pixels_are_blended_with_white_or_the_given_colour() -> None:
    alpha = np.linspace(0, 255, PIXELS[..., 0].size).reshape(PIXELS.shape[:2]).astype(np.uint8)
    content = encoded(Image.fromarray(np.dstack([PIXELS, alpha])))
    share = alpha[..., None] / 255
    for colour in ((255, 255, 255), (10, 200, 0)):
        options = {"image": {"rgba_background_color": list(colour)}}
        seen = np.asarray(load("image", content, options).value).astype(float)
        assert np.abs(seen - (PIXELS * share + np.array(colour) * (1 - share))).max() <= 1
    palette = Image.fromarray(PIXELS).quantize(8)
    assert (pixels_of(encoded(palette, transparency=palette.getpixel((0, 0))))[0, 0] == 255).all()


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue", "lime")]
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (pixels_of(content) == (255, 0, 0)).all()


def test_gray_of_16_bits_keeps_its_upper_8() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    np.testing.assert_array_equal(pixels_of(encoded(Image.fromarray(values)))[..., 0], values >> 8)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LA", "RGBA"])
def test_images_of_any_mode_become_rgb(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(pixels_of(image), expected)


def png_header(width: int, height: int) -> bytes:
    """A PNG file that claims a size, and has no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "size", [(100_000, 1), (1, 100_000), (201, 1), (9_460, 9_460), (60_000, 60_000), (1 << 30, 1 << 30)]
)
def test_an_image_with_too_many_pixels_or_too_thin_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidMedia, match=r"^messages\[0\]\.content\[1\]: .*(pixels|decompression bomb)"):
        load("image", png_header(*size))


def test_more_pixels_than_pil_opens_are_refused_by_its_limit() -> None:
    most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    with pytest.raises(InvalidMedia, match=f"more pixels than PIL opens. Allowed: up to {most:,} in all"):
        load("image", png_header(20_000, 20_000), {"image": {"max_pixels": 1 << 40}})


def test_limits_of_images_may_be_changed() -> None:
    thin = Image.new("RGB", (300, 1))
    assert load("image", thin, {"image": {"max_aspect_ratio": 300}}).value.size == (300, 1)
    with pytest.raises(InvalidMedia, match="Allowed: up to 299"):
        load("image", thin, {"image": {"max_pixels": 299}})


@pytest.mark.parametrize(
    "content",
    [b"", b"no image", encoded(Image.fromarray(PIXELS))[:-400], encoded(Image.fromarray(PIXELS), "JPEG")[:600],
     b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage", b"P6 99999 99999 255\n", b"GIF89a",
     b"<svg xmlns='http://www.w3.org/2000/svg'/>"],
)  # fmt: skip
def test_an_image_that_is_damaged_or_of_another_format_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidMedia, match=r"^messages\[0\]\.content\[1\]: It (is|has) "):
        load("image", content)


@pytest.mark.parametrize(
    "given",
    [None, 7, [], {}, object(), np.zeros((6, 6, 5), np.uint8), np.zeros(9, np.uint8), np.zeros((2, 4, 4, 3), np.uint8),
     np.full((4, 4, 3), 200.0), np.full((4, 4, 3), np.nan), np.zeros((0, 4, 3), np.uint8), np.zeros((4, 4), "<U3")],
)  # fmt: skip
def test_what_is_no_image_is_refused(given: Any) -> None:
    with pytest.raises(InvalidMedia, match=r"^messages\[0\]\.content\[1\]: It "):
        load("image", given)


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_detail_of_an_image_is_kept_and_any_other_refused(detail: str) -> None:
    assert LOADER.load("image", PIXELS, "x", detail=detail).detail == detail
    with pytest.raises(InvalidMedia, match="detail='medium' is not valid. Allowed: auto, low, high"):
        LOADER.load("image", PIXELS, "x", detail="medium")


def test_an_image_of_low_detail_fits_into_512_pixels() -> None:
    for size, low in (((1024, 256), (512, 128)), ((300, 900), (171, 512)), ((64, 48), (64, 48))):
        image = Image.new("RGB", size)
        assert LOADER.load("image", image, "x", detail="low").value.size == low
        assert image.size == LOADER.load("image", image, "x", detail="high").value.size == size


def tone(rate: int = 16_000, seconds: float = 0.5, hertz: float = 440.0) -> np.ndarray[Any, Any]:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def sound(samples: np.ndarray[Any, Any], rate: int = 16_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "ULAW"])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_wav_files_have_the_samples_that_soundfile_reads(subtype: str, num_channels: int) -> None:
    channels = np.stack([tone(), tone(hertz=700)][:num_channels], axis=1)
    content = sound(channels, subtype=subtype)
    media = load("audio", content)
    expected, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    assert media.rate == rate
    assert media.value.dtype == np.float32
    np.testing.assert_allclose(media.value, expected.mean(axis=1), atol=1e-7)


def test_wav_of_pcm_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    content = sound(tone())
    for name in ("soundfile", "av"):
        monkeypatch.setitem(sys.modules, name, None)
    assert len(load("audio", content).value) == 8000
    with pytest.raises(UnsupportedParameter, match=re.escape("pip install 'penstock[audio]'")):
        load("audio", sound_of_flac)


sound_of_flac = sound(tone(), kind="FLAC")


@pytest.mark.parametrize(("modality", "package"), [("image", "PIL.Image"), ("video", "av")])
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    modality: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedParameter, match=r"messages.*need the package.*pip install 'penstock\["):
        load(modality, b"content")


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_compressed_audio_is_decoded(kind: str) -> None:
    samples = tone(seconds=1.0)
    media = load("audio", sound(samples, kind=kind))
    assert media.rate == 16_000
    assert np.corrcoef(media.value[2000:14000], samples[2000:14000])[0, 1] > 0.9 or kind == "MP3"
    assert abs(len(media.value) - len(samples)) < 3000


def recorded(format: str, codec: str, samples: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=48_000)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.rate = 48_000
        container.mux([packet for frame in (frame, None) for packet in stream.encode(frame)])
    return file.getvalue()


def test_audio_of_a_container_that_soundfile_does_not_read_is_read_by_av() -> None:
    samples = tone(rate=48_000, seconds=0.5)
    media = load("audio", recorded("mp4", "aac", samples))
    assert media.rate == 48_000
    assert abs(len(media.value) - len(samples)) < 4096
    assert abs(np.abs(media.value).max() - 0.5) < 0.05


def test_arrays_are_audio_with_or_without_a_rate() -> None:
    samples = tone()
    for given in (samples, samples.astype(np.float64), samples[None], samples[:, None], samples.tolist()):
        np.testing.assert_array_equal(load("audio", (given, 16_000)).value, samples)
    assert load("audio", samples).rate is None
    both = np.stack([samples, 0 * samples])
    np.testing.assert_allclose(load("audio", (both, 8000)).value, samples / 2)
    np.testing.assert_allclose(load("audio", np.array([-32768, 0, 16384], np.int16)).value, [-1, 0, 0.5])
    np.testing.assert_allclose(load("audio", np.array([0, 128, 192], np.uint8)).value, [-1, 0, 0.5])


@pytest.mark.parametrize(
    "rates", [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (22_050, 24_000), (16_000, 11_025), (7, 5), (3, 8)]
)
@pytest.mark.parametrize("length", [1, 2, 50, 4001])
def test_resampling_equals_scipys(rates: tuple[int, int], length: int) -> None:
    samples = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    result = resampled(samples, *rates)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, resample_poly(samples.astype(np.float64), rates[1], rates[0]), atol=2e-6)


def test_resampling_keeps_a_tone_and_a_rate_that_fits() -> None:
    wanted, samples = tone(rate=16_000), tone(rate=44_100)
    np.testing.assert_allclose(resampled(samples, 44_100, 16_000)[200:-200], wanted[200:-200], atol=2e-3)
    assert resampled(samples, 44_100.0, 44_100) is samples


@pytest.mark.parametrize(
    "given",
    [(np.zeros(100), 0), (np.zeros(100), -5), (np.zeros(100), 10**9), (np.zeros(100), "16000"), np.zeros(0), None,
     "", b"", b"RIFF", b"RIFF\x00\x00\x00\x00WAVEfmt ", sound(tone())[:44], np.array([1.0, np.inf]),
     np.zeros((2, 2, 2)), np.array([1.0, 1e30]), sound(np.array([0.5, np.nan]), subtype="FLOAT"),
     sound(np.array([0.5, -1e30]), subtype="FLOAT"),
     b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"],
    ids=lambda given: type(given).__name__,  # some files have the time at which they were written
)  # fmt: skip
def test_what_is_no_audio_is_refused(given: Any) -> None:
    with pytest.raises(InvalidMedia):
        load("audio", given)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_audio_that_is_too_long_is_refused(kind: str) -> None:
    options = {"audio": {"max_seconds": 1}}
    with pytest.raises(InvalidMedia, match="longer than 1 s"):
        load("audio", sound(tone(seconds=1.5), kind=kind), options)
    with pytest.raises(InvalidMedia, match="longer than 1 s"):
        load("audio", (tone(seconds=1.5), 16_000), options)


def test_sounds_of_a_coding_that_none_reads_are_refused() -> None:
    content = bytearray(sound(tone()))
    content[34:36] = struct.pack("<H", 40)
    with pytest.raises(InvalidMedia, match="no audio that can be decoded"):
        load("audio", bytes(content))
    content[34:36] = struct.pack("<H", 64)
    assert len(load("audio", bytes(content)).value) == 8000 // 4


def test_a_wav_header_that_claims_more_than_the_file_has_allocates_nothing() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as header:
        header.setparams((1, 2, 16_000, 0, "NONE", ""))
        header.writeframes(b"\x00\x01" * 100)
    content = bytearray(file.getvalue())
    content[40:44] = struct.pack("<I", 0xFFFFFF00)
    content[4:8] = struct.pack("<I", 0xFFFFFFF0)
    assert len(load("audio", bytes(content)).value) == 100


def film(num_frames: int, *, codec: str = "libx264", format: str = "mp4", size: tuple[int, int] = (64, 48)) -> bytes:
    """A video of 10 frames per second, whose frames are ever lighter."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((*size[::-1], 3), 4 * number, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(("codec", "format"), [("libx264", "mp4"), ("libvpx", "webm"), ("mpeg4", "avi")])
def test_frames_are_taken_evenly_from_a_video(codec: str, format: str) -> None:
    media = load("video", film(50, codec=codec, format=format), {"video": {"num_frames": 6}})
    assert (media.frame_indices, media.num_file_frames, media.rate) == ((0, 9, 19, 29, 39, 49), 50, 10.0)
    assert media.value.shape == (6, 48, 64, 3)
    assert media.value.dtype == np.uint8
    levels = media.value.reshape(6, -1).mean(axis=1)
    np.testing.assert_allclose(levels, [4 * number for number in media.frame_indices], atol=4)


def test_a_short_video_gives_all_frames_and_fps_limits_them() -> None:
    content = film(20)
    assert len(load("video", content).value) == 20
    assert len(load("video", content, {"video": {"fps": 2}}).value) == 4
    assert len(load("video", film(50), {"video": {"num_frames": -1}}).value) == 50


def test_frames_are_a_video_with_or_without_metadata() -> None:
    frames = np.stack([PIXELS, 255 - PIXELS, PIXELS // 2])
    images = [Image.fromarray(frame) for frame in frames]
    jpegs = [base64.b64encode(encoded(image, "JPEG", quality=100, subsampling=0)).decode() for image in images]
    for given in (frames, list(frames), images, tuple(images)):
        np.testing.assert_array_equal(load("video", given).value, frames)
    decoded = load("video", f"data:video/jpeg;base64,{','.join(jpegs)}").value
    assert np.abs(decoded.astype(int) - frames).max() < 8
    media = load("video", (frames, {"fps": 24.0, "frames_indices": [0, 12, 24], "total_num_frames": 30}))
    assert (media.rate, media.frame_indices, media.num_file_frames) == (24.0, (0, 12, 24), 30)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [(film(30), {"max_seconds": 2}, "longer than 2 s"), (film(30), {"max_file_frames": 29}, "29 frames"),
     (film(30), {"max_pixels": 30 * 64 * 48 - 1}, "pixels in all"), (film(30)[:400], {}, "no video that can be read"),
     (b"", {}, "no video"), (sound(tone()), {}, "no video"), (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", {}, "no video"),
     (b"ffconcat version 1.0\nfile /etc/passwd\n", {}, "no video"), ([], {}, "no frames"), (7, {}, "Allowed"),
     ([PIXELS, PIXELS[:9]], {}, "one size"), (([PIXELS], {"fps": -1}), {}, "above 0"),
     (([PIXELS], {"frames_indices": [1, 2]}), {}, "number per frame")],
)  # fmt: skip
def test_what_is_no_video_or_beyond_its_limits_is_refused(given: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidMedia, match=said):
        load("video", given, {"video": options})


@pytest.mark.parametrize(
    ("given", "said"),
    [({"images": {}}, "Allowed: a dictionary for image, audio, video"), ({"image": 7}, "Allowed: a dictionary"),
     ({"video": {"num_frame": 3}}, "num_frames"), ({"video": {"num_frames": 0}}, "Allowed: a number above 0"),
     ({"video": {"fps": "2"}}, "Allowed: a number"), ({"image": {"max_pixels": -1}}, "Allowed: a number above 0"),
     ({"image": {"rgba_background_color": [0, 0, 256]}}, "0 to 255")],
)  # fmt: skip
def test_options_of_decoding_are_checked(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MediaOptions.read(given)


def test_a_playlist_opens_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that name other files are not read: such a file's content would reach the one who asks."""
    monkeypatch.chdir(tmp_path)
    Path("secret.ts").write_bytes(film(20, format="mpegts"))
    playlist = b"ffconcat version 1.0\nfile secret.ts\n"
    with av.open(io.BytesIO(playlist)) as file:
        assert file.streams.video, "the library itself follows it"
    for modality in ("video", "audio"):
        with pytest.raises(InvalidMedia, match="no (video|audio) that can be read"):
            load(modality, playlist)
