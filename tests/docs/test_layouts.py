# SPDX-License-Identifier: Apache-2.0
"""The numbers of docs/layouts.md follow from its own rule."""

import math
import re

from docs.raised import ROOT

PAGE = (ROOT / "docs/layouts.md").read_text()
UNITS = {"M": 1e6, "B": 1e9}


def test_the_table_is_what_sixteen_bytes_a_parameter_take_of_two_thirds_of_a_rank():
    header, _, *rows = [
        line.strip("|").split("|")
        for line in re.search(r"^\| parameters .*?(?=\n\n)", PAGE, re.M | re.S)[0].splitlines()
    ]
    memories = [int(re.search(r"(\d+) GiB", each)[1]) for each in header[2:]]
    assert len(memories) == 4 and len(rows) == 8
    for count, taken, *ranks in rows:
        number, unit = count.split()
        size_gib = 16 * float(number) * UNITS[unit] / 2**30
        assert taken.split() == [f"{size_gib:.1f}", "GiB"]
        assert [int(each) for each in ranks] == [math.ceil(size_gib / (memory * 2 / 3)) for memory in memories]
