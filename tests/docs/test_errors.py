# SPDX-License-Identifier: Apache-2.0
"""docs/errors.md has a row for every error that the sources raise, of that type, and none that they do not."""

import re
from dataclasses import dataclass

import pytest
from docs.raised import GAP, ROOT, literals, raised

# Files that raise what other lines have put into words, and these words: each has a row.
MADE_ELSEWHERE = {
    "lamina/config/config_reader.cc": ["… is not allowed; expected …"],
    "lamina/config/problems.cc": ["… is not allowed; expected …"],
    "lamina/messaging/mailbox.cc": ["… over ranks …"],
    "lamina/messaging/mutual_waits.cc": ["ranks wait for each other: …"],
    "lamina/collective/work.cc": ["… over ranks …"],
    "lamina/dist/current.cc": ["[rank …/…] …: …"],
    "lamina/model/agreement.cc": ["rank … built another model than rank …"],
    "lamina/frontend/model_step.cc": ["… cannot be split into … microbatches: its size …"],
    "lamina/frontend/step.cc": ["… cannot be split into … microbatches: its size …"],
    "lamina/launch/options/options.cc": [
        "--preload must name Python modules",
        "say what to run",
        "-m (a Python module) and -c (a program) exclude each other",
        "… must be … or greater",
    ],
    "lamina/runtime/step_state.cc": ["step …: rank … has entered the step function …"],
    "lamina/plan/file_tree.cc": ["nodes: …"],
    "lamina/plan/json_reader.cc": ["nodes: …"],
    "lamina/transport/inproc/network.cc": ["rank … is lost"],
    "lamina/rendezvous/mesh.cc": ["no connection with … in time"],
    "lamina/rendezvous/roll_call.cc": ["… did not join within …"],
    "lamina/transport/ucx/ucx_send.cc": ["rank … is lost"],
    "lamina/value/released.cc": [
        "… lives in partition … on rank …",
        "this parameter was created inside delay_param_initialization()",
    ],
    "python/bindings/parameters.cc": [
        "the gradient of a parameter that another rank owns was set",
        "the data of a parameter that another rank owns was set",
    ],
    "python/lamina/remote/calls.py": [
        "its argument … was changed by one call while another …",
        "… was replaced in a step",
    ],
    "python/lamina/saved_state/archives.py": ["… was saved by a job of …"],
    "python/lamina/remote/arguments.py": ["… to what cannot be sent back"],
    "python/lamina/torch_patches/module_attributes.py": ["… is set on partition … in a step, and … on partition …"],
    "python/lamina/pipeline/batches.py": ["argument … of shape … cannot be split into …"],
    "python/lamina/exits/failures.py": ["raised on rank …, where the traceback was"],
    "python/lamina/pipeline/distributed_model.py": ["this partial state dict was saved by …"],
    "python/lamina/saved_state/saving.py": ["… was saved by a job of …", "…: there is no such file"],
    "python/lamina/saved_state/state_dicts.py": ["same_partition_load=True, but …"],
}
BUILT_IN = {"AttributeError", "FileNotFoundError", "TypeError"}  # raised as Python's own


@dataclass(frozen=True)
class Row:
    words: str
    kinds: frozenset[str]

    def says(self, words: str) -> bool:
        return bool(pattern(self.words).search(words))


def pattern(words: str) -> re.Pattern:
    return re.compile(r"[^\n]*?".join(re.escape(part.strip()) for part in words.split(GAP) if part.strip()))


def rows() -> list[Row]:
    found = []
    for line in (ROOT / "docs/errors.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and cells[0] != "first words":
            kinds = frozenset(re.findall(r"`(\w+)`", cells[1]))
            found += [Row(words.strip(), kinds) for _, words in re.findall(r"(`+)(.+?)\1", cells[0])]
    return found


ROWS = rows()
SITES = raised()
ENDS = ("…an object", "…: …failed…")  # of messages whose first words are made elsewhere
SPOKEN = [site for site in SITES if re.search(r"[a-z]{2}", site.words) and site.words not in ENDS]


def test_the_sources_are_found():
    assert len(SPOKEN) > 250 and len(ROWS) > 200
    assert {"UsageError", "ConfigError", "PeerError", "TimeoutError", "FormatError"} <= {site.kind for site in SPOKEN}


@pytest.mark.parametrize("site", SPOKEN, ids=lambda site: site.where)
def test_an_error_has_a_row(site):
    rows = [row for row in ROWS if row.says(site.words)]
    assert rows, f"{site.where}: no row for {site.words!r}"
    assert any(site.kind in row.kinds for row in rows), f"{site.where}: {site.kind}, the row says {rows[0].kinds}"


def test_what_has_its_words_from_elsewhere_has_rows():
    silent = {site.where.partition(":")[0] for site in SITES if site not in SPOKEN}
    assert silent == set(MADE_ELSEWHERE)
    assert {words for each in MADE_ELSEWHERE.values() for words in each} <= {row.words for row in ROWS}


def test_no_row_is_stale():
    said = literals()
    assert not [row.words for row in ROWS if not pattern(row.words).search(said)]
    elsewhere = {words for each in MADE_ELSEWHERE.values() for words in each}
    unraised = [row for row in ROWS if not any(row.says(site.words) for site in SPOKEN)]
    assert not [row.words for row in unraised if row.words not in elsewhere and not row.kinds & BUILT_IN]
