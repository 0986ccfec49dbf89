"""Reading of a model's processor of Transformers, put together from parts that need no torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.checkpoints.json_file import read_json_object
from penstock.errors import ModelError

# Classes of Transformers by the names of parts.
_READERS = {
    "tokenizer": "AutoTokenizer",
    "feature_extractor": "AutoFeatureExtractor",
    "audio_processor": "AutoFeatureExtractor",
    "video_processor": "AutoVideoProcessor",
}


def read_processor(folder: Path, model_type: str) -> Any:
    """Read the processor of a model's folder.

    A part whose package is not installed, such as some of videos without torchvision, is None. Raises ModelError for a
    folder whose files are missing or damaged.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    from penstock.media.processors import own

    named = [name for name in _named_classes(folder) if name in PROCESSOR_MAPPING_NAMES.values()]
    name = str(named[0] if named else PROCESSOR_MAPPING_NAMES.get(model_type))
    with _damage_named(f"processor of {folder.name} ({name})"):
        made: Any = getattr(own, name, None)
        if made is not None:
            fields, _ = transformers.ProcessorMixin.get_processor_dict(folder, local_files_only=True)
            return made(*(_read_part(folder, part, name) for part in made.parts), fields)
        processor_class = getattr(transformers, name, None)
        if processor_class is None:
            raise ModelError(f"Transformers {transformers.__version__} has no processor for model_type={model_type!r}.")
        # Its text is logged, and not all parts are JSON; a part that is missing has no class to be checked against.
        changes = {"check_argument_for_proper_class": lambda *given: type(given[-1]), "__repr__": object.__repr__}
        made = type(name, (processor_class,), changes)
        fields, _ = made.get_processor_dict(folder, local_files_only=True)
        return made.from_args_and_dict([_read_part(folder, part, name) for part in made.get_attributes()], fields)


def read_image_processor(folder: Path) -> Any:
    """Read the image processor of a model's folder. Raises ModelError as `read_processor`."""
    with _damage_named(f"image processor of {folder.name}"):
        return _read_part(folder, "image_processor", "")


@contextmanager
def _damage_named(what: str) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # damaged files raise anything
        raise ModelError(
            f"The {what} cannot be read: {error} It needs preprocessor_config.json or processor_config.json, and the "
            "tokenizer's files."
        ) from error


def _named_classes(folder: Path) -> list[Any]:
    """Classes of the processor that the folder's files name."""
    files = [folder / name for name in ("processor_config.json", "preprocessor_config.json")]
    return [read_json_object(file, ModelError, is_optional=True).get("processor_class") for file in files]


def _read_part(folder: Path, name: str, processor: str) -> Any:
    import transformers

    # Some versions have no such class of their package without torchvision, though it reads the processors of PIL.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.utils import is_torchvision_available
    from transformers.video_processing_utils import BaseVideoProcessor

    from penstock.media.processors.videos import VIDEO_PROCESSORS

    if name == "video_processor" and processor in VIDEO_PROCESSORS:
        fields, _ = BaseVideoProcessor.get_video_processor_dict(folder, local_files_only=True)
        return VIDEO_PROCESSORS[processor](fields)
    if name == "video_processor" and not is_torchvision_available():
        return None
    reader = AutoImageProcessor if name == "image_processor" else getattr(transformers, _READERS[name])
    return reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
