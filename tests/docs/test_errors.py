# SPDX-License-Identifier: Apache-2.0
"""docs/errors.md has a row for every code that the sources give an error, of that type, and none that they do not."""

import re
from collections import Counter

import pytest
from docs.raised import ROOT, raised

from lamina import errors

PAGE = (ROOT / "docs/errors.md").read_text()
ROWS = re.findall(r"^\| `([a-z]+-[a-z-]+)` \| (.*?) \|", PAGE, re.MULTILINE)
TYPES = {code: set(re.findall(r"`(\w+)`", types)) for code, types in ROWS}
SITES = raised()


def test_the_sources_are_found():
    assert len(SITES) > 80 and {".py", ".cc"} <= {
        "." + site.where.partition(":")[0].rpartition(".")[2] for site in SITES
    }


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.code}-{site.where}")
def test_a_code_has_a_row_of_its_type(site):
    assert site.code in TYPES, f"{site.where}: docs/errors.md has no row for {site.code}"
    assert site.kind in TYPES[site.code], f"{site.where}: {site.kind}, the row says {TYPES[site.code]}"


def test_no_row_is_stale():
    raised_here = {(site.code, site.kind) for site in SITES}
    assert not {(code, kind) for code, kinds in TYPES.items() for kind in kinds} - raised_here


def test_a_code_has_one_row_and_rows_are_in_order():
    assert not [code for code, count in Counter(code for code, _ in ROWS).items() if count > 1]
    for section in PAGE.split("\n## ")[1:]:
        codes = re.findall(r"^\| `([a-z]+-[a-z-]+)` \|", section, re.MULTILINE)
        assert codes == sorted(codes)
        assert len({code.partition("-")[0] for code in codes}) <= 1, "a section is one word"


def test_every_type_has_a_row():
    rows = set(re.findall(r"^\| `(\w+Error|Error)`", PAGE, re.MULTILINE))
    assert rows >= {"StartError"} | {
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.Error)
    }
