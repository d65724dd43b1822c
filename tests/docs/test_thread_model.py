# SPDX-License-Identifier: Apache-2.0
"""The thread model lists every thread and mutex that the sources declare, and no other."""

import re
from collections import Counter

from docs.raised import ENGINE, ROOT

KINDS = r"std::(?:jthread|thread|(?:shared_|recursive_)?(?:timed_)?mutex)\b(?!::)"
MENTION = re.compile(KINDS)
LOCK = re.compile(r"(?:unique|scoped|shared)_lock<" + KINDS + r"|lock_guard<" + KINDS)
MEMBER = re.compile(r"(?:vector<|optional<)?" + KINDS + r">?\s+(\w+(?:\s*,\s*\w+)*)")
OTHER = re.compile(r"std::async\b|pthread_create\b|using \w+ = " + KINDS)  # have no name that a row could have
KEPT = re.compile(r"(\w+)\s*=\s*\*new " + KINDS)
STARTED = re.compile(r"\w+\s*=\s*" + KINDS + r"\(")  # of a member, which is listed where it is declared
ROW = re.compile(r"^\| `([\w./]+)` \| `([\w:]+)` \|", re.MULTILINE)


def declared(text):
    """The names of threads and mutexes in a source; its line where they have none."""
    for line in text.splitlines():
        line = LOCK.sub("", line.partition("//")[0])
        names = [name for found in MEMBER.findall(line) for name in re.findall(r"\w+", found)] + KEPT.findall(line)
        yield from names
        if OTHER.search(line) or (not names and MENTION.search(line) and not STARTED.search(line)):
            yield line.strip()


def test_a_declaration_is_seen_in_whatever_form_and_a_use_is_not():
    assert list(declared("mutable std::mutex mutex_;  // of std::thread\nstd::vector<std::jthread> all_;")) == [
        "mutex_",
        "all_",
    ]
    assert list(declared("auto& lock = *new std::shared_mutex();\nstd::thread([] {}).detach();")) == [
        "lock",
        "std::thread([] {}).detach();",
    ]
    assert list(declared("std::mutex one_, other_;\nusing Lock = std::mutex;")) == [
        "one_",
        "other_",
        "using Lock = std::mutex;",
    ]
    assert not list(declared("thread_ = std::thread([] {});\nvoid run(std::unique_lock<std::mutex>& lock);"))
    assert not list(declared("std::thread::id thread_;  // std::mutex\nstd::lock_guard<std::mutex> guard(mutex_);"))


def test_every_thread_and_mutex_of_the_engine_has_a_row_and_every_row_has_one():
    sources = [path for folder in ENGINE for path in (ROOT / folder).rglob("*.*") if path.suffix in (".h", ".cc")]
    found = Counter(
        (str(path.relative_to(ROOT)), name) for path in sorted(sources) for name in declared(path.read_text())
    )
    page = (ROOT / "docs/thread-model.md").read_text().partition("## Every thread and mutex")[2]
    rows = [(file if (ROOT / file).exists() else f"lamina/{file}", name) for file, name in ROW.findall(page)]
    listed = Counter((file, name.rpartition("::")[2]) for file, name in rows)
    without_row, without_source = found - listed, listed - found
    assert not without_row
    assert not without_source
