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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
