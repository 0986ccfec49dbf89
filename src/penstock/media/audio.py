"""Audio of prompts: samples of one channel. WAV files of PCM are read by Python, others by soundfile or av."""

from __future__ import annotations

import io
import itertools
import math
import wave
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.param_checks import shown
from penstock.errors import InvalidMedia, UnsupportedParameter
from penstock.media.containers import opened
from penstock.media.item import AUDIO, Media, Samples, package
from penstock.media.options import AudioOptions

MIN_RATE, MAX_RATE = 1_000, 768_000
# Of samples that come without a rate, for the limit of their length.
_USUAL_RATE = 16_000
_BLOCK = 1 << 18
# Beyond it the power of a spectrogram is no float any more.
_LOUDEST = 1e6
_NUM_ZEROS = 10
_KAISER_BETA = 5.0


def read_audio(given: Any, options: AudioOptions) -> Media:
    """Sound of a file's content, of samples, or of (samples, rate). Raises InvalidMedia."""
    rate: Any
    if isinstance(given, bytes):
        samples, rate = _decoded(given, options)
    else:
        values, rate = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        samples = _samples_of(values, rate, options)
    if not len(samples):
        raise InvalidMedia("It has no samples. Allowed: at least one.")
    if not -_LOUDEST <= samples.min() <= samples.max() <= _LOUDEST:
        raise InvalidMedia(
            f"It has samples of {samples.min():g} to {samples.max():g}. Allowed: finite numbers, of -1 to 1 as a rule."
        )
    return Media(AUDIO, samples, None if rate is None else float(rate))


def _decoded(content: bytes, options: AudioOptions) -> tuple[Samples, float]:
    """Samples [N] of a file's content, and its rate in Hz."""
    if content[:4] == b"RIFF":
        try:
            return _wav(content, options)
        except (wave.Error, EOFError):
            pass  # a WAV file of another coding than PCM
    library = package("soundfile", "Audio files other than WAV of PCM", "audio")
    try:
        with library.SoundFile(io.BytesIO(content)) as file:
            rate = file.samplerate
            # An empty block ends them; the number of frames in the header may be wrong.
            blocks = (file.read(_BLOCK, dtype="float32", always_2d=True) for _ in itertools.count())
            return _joined((block.mean(axis=1) for block in blocks), rate, options), float(rate)
    except (library.LibsndfileError, RuntimeError):
        pass
    try:
        return _by_av(content, options)
    except UnsupportedParameter:
        formats = ", ".join(sorted(library.available_formats()))
        raise InvalidMedia(
            f"It is no audio that can be read. Allowed: {formats}; others need pip install 'penstock[video]'."
        ) from None


def _samples_of(given: Any, rate: Any, options: AudioOptions) -> Samples:
    """Samples [N] of an array [N], or of one with a row or a column per channel: floats, or integers of full range.

    rate: in Hz; None where it is that of the model.
    """
    try:
        values = np.asarray(given)
    except Exception:  # a tensor of a device
        values = np.empty(0, dtype=object)
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiu" or not values.size:
        raise InvalidMedia(
            f"It is {shown(given)}. Allowed: (samples, rate) with an array of floats or integers, bytes, a path or "
            "a URL."
        )
    if rate is not None:
        _check_rate(rate)
    num_samples = max(values.shape)
    _check_length(num_samples, rate or _USUAL_RATE, options)
    samples = _floats(values)
    if samples.ndim == 2:
        samples = samples.mean(axis=0 if samples.shape[0] < samples.shape[1] else 1)
    return samples


def resampled(samples: Samples, rate: float, wanted: float) -> Samples:
    """Samples [M] at another rate, by a polyphase filter: a sinc in a Kaiser window of 10 zeros on each side.

    The filter and its place are those of `scipy.signal.resample_poly`. rate, wanted: in Hz, whole numbers.
    """
    common = math.gcd(round(rate), round(wanted))
    up, down = round(wanted) // common, round(rate) // common
    if up == down or not len(samples):
        return samples
    widest = max(up, down)
    half = _NUM_ZEROS * widest
    taps = np.sinc(np.arange(-half, half + 1) / widest) * np.kaiser(2 * half + 1, _KAISER_BETA)
    taps *= up / taps.sum()
    num_out, num_taps = -(-len(samples) * up // down), -(-len(taps) // up)
    # Taps of each phase, last one first, so that they run along the samples: [up, num_taps].
    phases = np.zeros((num_taps, up))
    phases.reshape(-1)[: len(taps)] = taps
    phases = phases[::-1].T.astype(np.float32)
    # Output n is at (n * down + half) / up; its first phases look before the samples, its last ones behind them.
    places = np.arange(num_out) * down + half
    padded = np.concatenate([np.zeros(num_taps - 1, np.float32), samples, np.zeros(num_taps + half // up, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, num_taps)
    result = np.empty(num_out, np.float32)
    for first in range(min(up, num_out)):
        start, phase = divmod(int(places[first]), up)
        count = len(result[first::up])
        result[first::up] = windows[start : start + (count - 1) * down + 1 : down] @ phases[phase]
    return result


def _wav(content: bytes, options: AudioOptions) -> tuple[Samples, float]:
    with wave.open(io.BytesIO(content)) as file:
        num_channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
        _check_rate(rate)
        _check_length(min(file.getnframes(), len(content) // (width * num_channels)), rate, options)
        if width > 4:
            raise wave.Error(f"samples of {width} bytes")
        data = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    data_NB = data[: len(data) // (width * num_channels) * width * num_channels].reshape(-1, width)
    if width == 3:
        # In the upper bytes of 32 bits: little-endian.
        data_NB = np.pad(data_NB, ((0, 0), (1, 0)))
    values = data_NB.view("u1" if width == 1 else f"<i{data_NB.shape[1]}")
    return _floats(values).reshape(-1, num_channels).mean(axis=1), float(rate)


def _floats(values: NDArray[Any]) -> Samples:
    """Samples as floats; integers of full range become -1 to 1."""
    if values.dtype.kind in "iu":
        limits = np.iinfo(values.dtype)
        middle = 0 if limits.min < 0 else limits.max // 2 + 1
        values = (values.astype(np.float64) - middle) / (limits.max - middle + 1)
    return values.astype(np.float32)


def _by_av(content: bytes, options: AudioOptions) -> tuple[Samples, float]:
    with opened(content, AUDIO) as file:
        from av import AudioResampler

        rate = file.streams.audio[0].rate
        mix = AudioResampler(format="fltp", layout="mono")
        frames = (part for frame in file.decode(audio=0) for part in mix.resample(frame))
        return _joined((frame.to_ndarray()[0] for frame in frames), rate, options), float(rate)


def _joined(blocks: Iterable[NDArray[np.float32]], rate: float, options: AudioOptions) -> Samples:
    """Samples of all blocks, up to the first that is empty."""
    _check_rate(rate)
    parts, num_samples = [], 0
    for block in blocks:
        if not len(block):
            break
        num_samples += len(block)
        _check_length(num_samples, rate, options)
        parts.append(block)
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _check_rate(rate: Any) -> None:
    if not isinstance(rate, (int, float, np.number)) or not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidMedia(f"It has a rate of {shown(rate)} Hz. Allowed: {MIN_RATE:,} to {MAX_RATE:,}.")


def _check_length(num_samples: int, rate: float, options: AudioOptions) -> None:
    if num_samples > options.max_seconds * rate:
        raise InvalidMedia(f"It is longer than {options.max_seconds:,.0f} s, which is the limit of audio.")
