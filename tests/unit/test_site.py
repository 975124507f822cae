"""The documentation as a site: strict, complete, and each page near the first one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the build fails for a page that is not in the navigation, a dead link and a dead anchor."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


def links_of(page: Path) -> set[Path]:
    """The pages that a page links to."""
    targets = re.findall(r'href="([^":#?]+\.html)', page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets}


def test_each_page_is_at_most_two_clicks_from_the_first_one(site: Path) -> None:
    first = (site / "index.html").resolve()
    near = {first} | links_of(first)
    near |= {target for page in tuple(near) for target in links_of(page)}
    far = {page.resolve() for page in site.rglob("*.html") if page.name != "404.html"} - near
    assert not far


def test_llms_txt_names_each_page_with_a_sentence_and_its_markdown(site: Path) -> None:
    lines = (site / "llms.txt").read_text(encoding="utf-8").splitlines()
    pages = {match[1]: match[2] for line in lines if (match := re.fullmatch(r"- \[[^\]]+\]\(([^)]+)\): (.+)", line))}
    assert set(pages) == {
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md") if page.name != "SKILL.md"
    }
    assert all((site / name).is_file() for name in pages)
    assert not [name for name, sentence in pages.items() if re.search(r"`|\]\(|^#", sentence)]


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = [
        f"{page.name}: {address}"
        for page in site.rglob("*.html")
        for address in re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
    ]
    assert not loaded
