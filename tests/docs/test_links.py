# SPDX-License-Identifier: Apache-2.0
"""The pages lead to what there is."""

import re

import pytest
from docs.raised import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchor(title):
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def anchors(page):
    return {anchor(title) for title in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`(?!\])", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_index_of_decisions_has_each_of_them_once():
    folder = ROOT / "docs/decisions"
    index = re.findall(r"^- \[.*\]\((.*)\)$", (folder / "README.md").read_text(), re.MULTILINE)
    pages = [page for page in sorted(folder.glob("*.md")) if page.name != "README.md"]
    titles = [
        (page.name, title) for page in pages for title in re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    ]
    assert not [title for _, title in titles if not title.endswith("?")]
    assert sorted(index) == sorted(f"{name}#{anchor(title)}" for name, title in titles)


def test_the_recipes_name_files_that_there_are():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:lamina|python|tests|docs|scripts|cmake)/[\w/.]+)`", text)
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_the_site_has_every_page_once():
    index = (ROOT / "docs/site/index.rst").read_text()
    named = re.findall(r"^   /([\w/-]+)$", index, re.MULTILINE)
    assert re.search(r"^   /docs/decisions/\*$", index, re.MULTILINE)  # all others of that folder
    pages = [str(page.relative_to(ROOT).with_suffix("")) for page in PAGES]
    assert sorted(named) == sorted(page for page in pages if not re.match(r"docs/decisions/(?!README)", page))
