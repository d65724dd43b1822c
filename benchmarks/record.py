# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/benchmarks.md: a file of benchmarks/recorded for each benchmark, and the page's tables made of
these files alone."""

import json
import time
from collections.abc import Iterable
from pathlib import Path

from measure import OUT, table

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "recorded"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- Figures: benchmarks/run.py --record writes what follows, from benchmarks/recorded. -->"
END = "<!-- End of the figures. -->"


def keep(name: str, effort: str) -> None:
    """Takes the result of a run over. Of its samples the median, the smallest, the largest and their number stay."""
    content = json.loads((OUT / f"{name}.json").read_text())
    for row in content["figures"]:
        row["n"] = len(row.pop("samples"))
    version = (ROOT / "VERSION").read_text().strip()
    content["recorded"] = f"version {version}, {time.strftime('%Y-%m-%d')}{', ' + effort if effort else ''}"
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def page(text: str, order: Iterable[str]) -> str:
    """The page with the tables of all that is recorded in their place, in this order."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    sections = []
    for name in order:
        if (path := RECORDED / f"{name}.json").exists():
            content = json.loads(path.read_text())
            sections.append(f"### `{name}`\n\n{content['recorded']}\n\n```text\n{table(content)}```\n")
    return f"{before}{BEGIN}\n\n" + "\n".join(sections) + f"\n{END}{after}"


def write_page(order: Iterable[str]) -> None:
    PAGE.write_text(page(PAGE.read_text(), order))
