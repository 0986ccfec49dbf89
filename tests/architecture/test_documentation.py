"""What the pages of the documentation point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# Where a page may mean a file to be: pages say `worker/worker.py` for what is in the package.
ROOTS = [
    REPOSITORY,
    REPOSITORY / "src",
    REPOSITORY / "src" / "penstock",
    REPOSITORY / "src" / "penstock" / "kernels" / "native",
    REPOSITORY / "src" / "penstock" / "kernels" / "native" / "csrc",
]


def said_to_be_there(page: Path) -> list[str]:
    """Its lines, but for those of examples, and of paragraphs and sections that say "planned"."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    built = [section for section in sections if "planned" not in section.partition("\n")[0]]
    blocks = [block for section in built for block in re.split(r"\n\n|\n(?=\|)", section)]
    return [block for block in blocks if "planned" not in block.lower()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    names = re.findall(r"`([\w/.*-]+/[\w.*-]+\.(?:py|inl|h|cpp|c|md))[`:]", "\n".join(said_to_be_there(page)))
    missing = [name for name in names if not any(list(root.glob(name)) for root in ROOTS)]
    assert missing == []


@pytest.fixture(scope="module")
def identifiers() -> set[str]:
    """Identifiers of the source, the tests and the tools."""
    files = (file for folder in ("src", "tests", "tools", "benchmarks") for file in (REPOSITORY / folder).rglob("*.py"))
    return {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}


ENDINGS = (".py", ".cpp", ".inl", ".h", ".md", ".toml", ".json", ".jsonl")
INTERNALS = [page for page in PAGES if page.parent.name == "internals"]


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.name)
def test_classes_and_functions_that_a_page_names_exist(page: Path, identifiers: set[str]) -> None:
    names = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", "\n".join(said_to_be_there(page))))
    # Classes and attributes; other names are files, options, functions of C++ or words.
    named = [name for name in names if re.search(r"[a-z][A-Z]|\.[a-z_]+$", name)]
    parts = {part for name in named if not name.endswith(ENDINGS) for part in name.split(".")}
    assert parts - identifiers == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
