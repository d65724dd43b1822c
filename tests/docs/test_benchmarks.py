# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md is what `benchmarks/run.py --record` writes of the recorded figures, and has no others. Figures of
the README are recorded, too."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def record(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import record
    import run

    return record, [each.name for each in run.BENCHMARKS]


def figures(name):
    """The numbers that the table of a benchmark shows."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = page.partition(f"### `{name}`")[2].partition("\n### ")[0]
    return {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", table)}


def test_the_page_is_what_the_command_writes(record):
    record, order = record
    text = record.PAGE.read_text()
    assert text == record.page(text, order), "run .venv/bin/python benchmarks/run.py --record NAME"
    assert {path.stem for path in record.RECORDED.iterdir()} <= set(order)


def test_the_page_has_no_figure_beside_its_tables(record):
    record, _ = record
    before, _, rest = record.PAGE.read_text().partition(record.BEGIN)
    _, _, after = rest.partition(record.END)
    assert not re.findall(r"\d\.\d", before + after)


def test_the_figures_of_the_readme_are_recorded():
    text = (ROOT / "README.md").read_text()
    section = text.partition("## Beside peers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+) \| ([\d.]+):", section, re.MULTILINE)
    said = [(name, float(value)) for name, ours, peer in rows for value in (ours, peer) if value != "1"]
    said += [
        (name, float(value))
        for *values, name in re.findall(r"([\d.]+) to ([\d.]+) .*\n?.*\(`(\w+)`\)", section)
        for value in values
    ]
    assert len(rows) >= 3
    assert not [(name, value) for name, value in said if value not in figures(name)]
