"""Processors that are put together from a model's files make what Transformers' and the papers' rules say."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor
from transformers.video_utils import VideoMetadata

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.errors import InvalidRequest
from penstock.media.item import Media
from penstock.media.processors.processor import MediaProcessor
from penstock.media.processors.reading import read_processor
from penstock.media.processors.videos import (
    InternVLVideos,
    Qwen2Videos,
    Qwen3Videos,
    SmolVLMVideos,
    VideoProcessor,
    patches_of,
)
from support.multimodal_models import MODEL_TYPES, film, picture, save_tokenizer, tone, write_processor


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


def metadata_of(num_frames: int, rate: float | None) -> VideoMetadata:
    duration = None if rate is None else num_frames / rate
    return VideoMetadata(num_frames, rate, duration=duration, frames_indices=list(range(num_frames)))


def test_frames_are_taken_by_the_rules_of_each_family() -> None:
    film_of_10_s = metadata_of(240, 24.0)
    qwen2 = Qwen2Videos({"fps": 1, "do_sample_frames": True})
    assert qwen2.sampled(film_of_10_s, qwen2.options) == [24 * second for second in range(10)]
    assert qwen2.sampled(film_of_10_s, {**qwen2.options, "num_frames": 5}) == [0, 60, 120, 180]
    assert qwen2.sampled(film_of_10_s, {**qwen2.options, "fps": 0.1}) == [0, 60, 120, 180]
    assert qwen2.sampled(metadata_of(5, 24.0), qwen2.options) == [0, 1, 2, 3]
    intern = InternVLVideos({"num_frames": 4})
    assert intern.sampled(film_of_10_s, intern.options) == [30, 90, 150, 210]
    onevision = VideoProcessor({"num_frames": 7})
    assert onevision.sampled(film_of_10_s, onevision.options) == [0, 34, 68, 102, 137, 171, 205]
    smol = SmolVLMVideos({"video_sampling": {"max_frames": 4, "fps": 1, "video_size": {"longest_edge": 512}}})
    assert smol.options["size"] == {"longest_edge": 512}
    # Longer than 4 s without the first and the last second: these are skipped.
    assert smol.sampled(film_of_10_s, smol.options) == [24, 88, 152, 216]
    with pytest.raises(ValueError, match="fps is not known"):
        smol.sampled(metadata_of(5, None), smol.options)
    with pytest.raises(ValueError, match="num_frames=None and fps=1 do not say how many frames to take"):
        smol.sampled(film_of_10_s, {**smol.options, "num_frames": None})


@pytest.mark.parametrize("seed", range(4))
def test_videos_of_qwen3_vl_and_smolvlm_are_sampled_and_sized_as_by_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    qwen3, smol = Qwen3Videos({}), SmolVLMVideos({"num_frames": 8, "fps": 2})
    for _ in range(50):
        num_frames, rate = int(rng.integers(2, 400)), float(rng.uniform(1, 60))
        theirs, own = metadata_of(num_frames, rate), metadata_of(num_frames, rate)
        expected = Qwen3VLVideoProcessor.sample_frames(Qwen3VLVideoProcessor, theirs)
        assert qwen3.sampled(own, qwen3.options) == expected.tolist()
        expected = SmolVLMVideoProcessor.sample_frames(None, theirs, num_frames=8, fps=2)
        assert smol.sampled(own, smol.options) == expected.tolist()
        height, width = (int(side) for side in rng.integers(20, 900, 2))
        limits = {"min_pixels": 128 * 32 * 32, "max_pixels": 32 * 32 * 768}
        size = smart_resize(num_frames, height, width, factor=32, **limits)
        assert qwen3.frame_size(height, width, num_frames, qwen3.options) == size


def test_patches_of_a_video_are_those_of_transformers() -> None:
    frames = torch.from_numpy(film(5, 24, 32)).permute(0, 3, 1, 2).float()
    options = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    patches, grid = patches_of(frames, options)
    (expected,), *expected_grid = Qwen3VLVideoProcessor.patchify(None, frames[None], 4, 2, 2)
    assert grid == expected_grid == [3, 8, 6]
    assert torch.equal(patches, expected)


def test_pixels_of_a_video_are_normalised_and_near_those_of_pil() -> None:
    frames = film(3, 50, 40)
    processor = Qwen2Videos({"min_pixels": 16 * 16, "max_pixels": 28 * 28, "patch_size": 2})
    made = processor([frames], video_metadata=[metadata_of(3, None)])
    assert made["video_grid_thw"].tolist() == [[2, 12, 14]]
    # The first frame again, from the first rows of its patches.
    pixels = made["pixel_values_videos"].view(2, 6, 7, 2, 2, 3, 2, 2, 2).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    mean, std = (np.array(processor.options[name])[:, None, None] for name in ("image_mean", "image_std"))
    values = pixels.reshape(4, 3, 24, 28)[0].numpy() * std + mean
    image = Image.fromarray(frames[0]).resize((28, 24), Image.Resampling.BICUBIC)
    assert np.abs(values * 255 - np.asarray(image).transpose(2, 0, 1)).max() < 2


def test_a_selection_of_frames_is_not_sampled_again() -> None:
    frames, processor = film(2, 16, 16), Qwen3Videos({"size": {"shortest_edge": 64, "longest_edge": 4096}})
    selection = VideoMetadata(100, 10.0, duration=10.0, frames_indices=[0, 99])
    with pytest.raises(ValueError, match="do_sample_frames=True samples a whole video, and these are 2 of its 100"):
        processor([frames], video_metadata=[selection])
    processor([frames], video_metadata=[selection], do_sample_frames=False)


def test_a_clip_of_voxtral_is_the_windows_that_transformers_makes(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    write_processor(tmp_path, "voxtral")
    processor = read_processor(tmp_path, "voxtral")
    clips = [tone(0.5), tone(4.5)]
    made = processor(text=["<audio> w1 <audio>"], audio=clips, return_tensors="pt")
    # Windows of 2 s, with a token for 8 frames of 10 ms.
    expected = "<audio>" * 25 + " w1 " + "<audio>" * 75
    assert made["input_ids"].tolist() == processor.tokenizer([expected])["input_ids"]
    theirs = SimpleNamespace(feature_extractor=processor.feature_extractor)
    options = {"sampling_rate": 16000, "padding": True, "truncation": False, "pad_to_multiple_of": 32000}
    windows = VoxtralProcessor._retrieve_input_features(theirs, clips, 200, return_tensors="pt", **options)
    assert torch.equal(made["input_features"], windows)


def test_a_clip_that_is_longer_than_the_window_of_qwen2_audio_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    write_processor(tmp_path, "qwen2-audio")
    checkpoint = MultimodalCheckpoint("Qwen2AudioForConditionalGeneration", {"model_type": "qwen2_audio"}, ("audio",))
    processor = MediaProcessor(tmp_path, checkpoint, None, 0)
    assert processor.process(Media("audio", tone(2.0), 16000.0), None, None).text == "<audio>" * 50
    with pytest.raises(InvalidRequest, match=r"The audio has 2.5 s. Allowed by this model: up to 2 s."):
        processor.process(Media("audio", tone(2.5), 16000.0), None, None)


def media_processor(folder: Path, name: str, modality: str = "image", **options: Any) -> MediaProcessor:
    save_tokenizer(folder)
    write_processor(folder, name)
    checkpoint = MultimodalCheckpoint("Model", {"model_type": MODEL_TYPES[name]}, (modality,))
    return MediaProcessor(folder, checkpoint, options, 1 << 20)


def num_rows(processor: MediaProcessor, media: Media, **options: Any) -> int:
    return processor.process(media, options, None).text.count("<image>")


def test_options_of_a_request_change_the_number_of_pixels(tmp_path: Path) -> None:
    processor = media_processor(tmp_path, "qwen2-vl", max_pixels=1024)
    media = Media("image", picture(80, 80))
    assert num_rows(processor, media) == 16
    assert (
        num_rows(processor, media, max_pixels=256) == num_rows(processor, media, images_kwargs={"max_pixels": 256}) == 4
    )
    film_of_6 = Media("video", film(6, 24, 24), 2.0)
    grids = [
        processor.process(film_of_6, options, None).inputs["video_grid_thw"].to_numpy().tolist()
        for options in ({}, {"max_pixels": 64}, {"do_sample_frames": True, "num_frames": 2})
    ]
    assert grids == [[[3, 6, 6]], [[3, 2, 2]], [[1, 6, 6]]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_pixel": 4},
            "mm_processor_kwargs has 'max_pixel', which the model's processor does not take. Did you mean",
        ),
        ({"return_tensors": "np"}, "mm_processor_kwargs has 'return_tensors'"),
        ({"images_kwargs": {"fps": 2}}, "images_kwargs of mm_processor_kwargs has 'fps'"),
        ({"images_kwargs": 3}, "images_kwargs=3 of mm_processor_kwargs is not valid. Allowed: a dictionary"),
        ({"patch_size": 3}, "patch_size=3 of mm_processor_kwargs does not fit the encoder's weights. Allowed: 4"),
        ({"images_kwargs": {"merge_size": 0}}, "merge_size=0 of .* Allowed: 2"),
        ({"temporal_patch_size": "a"}, "temporal_patch_size='a' of .* Allowed: 2"),
        ({"min_pixels": 10**12}, "min_pixels=1000000000000 of .* beyond the limit. Allowed: up to 89,478,485"),
        ({"size": {"shortest_edge": 10**12}}, "size=.*1000000000000.* beyond the limit. Allowed: up to 89,478,485"),
        (
            {"rescale_factor": math.nan},
            "rescale_factor=nan of mm_processor_kwargs is not valid. Allowed: finite",
        ),
        ({"images_kwargs": {"image_mean": [0.5, 0.5, -math.inf]}}, "image_mean=.* is not valid. Allowed: finite"),
        ({"rescale_factor": 1e30}, "makes values of .* of the image. Allowed: finite numbers of up to 10,000"),
        ({"image_std": [1e-30, 1.0, 1.0]}, "makes values of .* of the image"),
        ({"max_pixels": "many"}, "processor does not take the image: .*max_pixels"),
    ],
)
def test_options_that_a_processor_does_not_take_are_refused_by_name(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    processor = media_processor(tmp_path, "qwen2-vl")
    with pytest.raises(InvalidRequest, match=message):
        processor.process(Media("image", picture(80, 80)), given, None)


@pytest.mark.parametrize(
    ("name", "given", "most"),
    [
        ("smolvlm", {"size": {"longest_edge": 1_000_000}}, "9,459"),
        ("internvl", {"max_patches": 10**9}, "256"),
        ("llava", {"size": {"shortest_edge": 20_000}}, "668"),
        ("llava", {"crop_size": {"height": 20_000, "width": 20_000}}, "9,459"),
    ],
)
def test_options_that_enlarge_an_image_are_bounded(tmp_path: Path, name: str, given: dict[str, Any], most: str) -> None:
    processor = media_processor(tmp_path, name)
    with pytest.raises(InvalidRequest, match=f"enlarges an image beyond the limit. Allowed: up to {most}"):
        processor.process(Media("image", picture(80, 80)), given, None)


@pytest.mark.parametrize("name", ["smolvlm", "internvl"])
def test_a_low_detail_is_the_image_without_tiles(tmp_path: Path, name: str) -> None:
    processor = media_processor(tmp_path, name)
    pixels = picture(64, 30)
    assert num_rows(processor, Media("image", pixels, detail="low")) == 4
    assert num_rows(processor, Media("image", pixels, detail="high")) > 4
    assert num_rows(processor, Media("image", pixels, detail="high")) == num_rows(processor, Media("image", pixels))
