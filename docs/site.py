"""Hooks of the documentation's site (mkdocs.yml): links into the code become text, and llms.txt lists the pages."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page without links to files outside of docs/, which the site does not have."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        return link[0] if target.is_relative_to(docs) and target.suffix != ".py" else link[1]

    return _LINK.sub(kept, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Write llms.txt, and each page's Markdown beside its HTML, for readers that are programs."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    pages = sections(config["nav"])
    for names in pages.values():
        for name in names:
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(docs / name, site / name)
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section, names in pages.items():
        lines += ["", f"## {section}", ""]
        lines += [f"- [{title}]({name}): {about}" for name in names for title, about in [summary(docs / name)]]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sections(nav: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The names of the pages, relative to docs/, by the section of the navigation in which they are."""
    return {title: list(_pages(below)) for section in nav for title, below in section.items()}


def _pages(nav: Any) -> Any:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(item)


def summary(page: Path) -> tuple[str, str]:
    """The title of a page, and the first sentence of its prose as plain text."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    title, _, below = text.strip().partition("\n")
    blocks = re.split(r"\n\s*\n|^#.*\n", below, flags=re.M)
    prose = next(" ".join(block.split()) for block in blocks if re.match(r"\s*[A-Z*`\[]", block))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).replace("*", "").replace("`", "")
    return title.lstrip("# "), re.split(r"(?<=\.)\s", plain)[0]
