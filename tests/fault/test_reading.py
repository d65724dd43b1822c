# SPDX-License-Identifier: Apache-2.0
"""Ranks of which some are killed, in a loop of the script's own that reads a loader: each update is of the samples, and
has the losses, of a run that nobody disturbed, with dropout."""

import json
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from launch.launcher_harness import PRELOAD
from soak import some

PROGRAM = Path(__file__).with_name("reading.py")
SHARDS = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": None}

# Ranks, --elastic, deaths, keys, environment.
WAYS = {
    "one copy of three": (3, "1", ["1:7"], {}, {}),
    "the first, and a second": (4, "1", ["0:2", "1:7"], {"microbatches": 2}, {}),
    "one that comes back": (3, "1:3", ["1:4"], {}, {"SLOW": "1.5"}),
    "a first that comes back": (3, "1:3", ["0:3"], {"microbatches": 2}, {"SLOW": "1.5"}),
    "workers": (3, "1", ["2:6"], {}, {"WORKERS": "2"}),
    "one of three partitions": (3, "1", ["0:8"], {"partitions": 3, "microbatches": 2}, {"SHUFFLES": "1"}),
    "one of two times two": (4, "1", ["3:4"], {"partitions": 2, "microbatches": 2}, {}),
    "divided states": (3, "1", ["2:5"], {"shard_optimizer_state": True}, {}),
}


def trained(launcher, name, ranks, elastic, deaths, keys, environment):
    """The samples and losses of each update, and the model; what the launcher has said."""
    folder = launcher.folder / name
    folder.mkdir()
    env = {"OUT": str(folder), "KEYS": json.dumps(keys)} | environment
    words = ("run", *PRELOAD, "-n", ranks, "--elastic", elastic, PROGRAM, *deaths)
    with tempfile.TemporaryDirectory() as of_workers:  # where those of a killed rank leave their sockets
        env |= {"TMPDIR": of_workers} if "WORKERS" in environment else {}
        job = launcher.run(*words, env=env, deadline_s=150)
    assert job.returncode == 0, job.stderr
    copies = defaultdict(dict)
    for path in folder.glob("read.*"):
        for note in map(json.loads, path.read_text().splitlines()):
            copies[note["update"], note["copies"], note["ranks"]][note["copy"]] = note
    updates = defaultdict(list)
    for (update, count, _), notes in copies.items():
        rows = [(loss, row) for note in notes.values() for loss, row in zip(note["losses"], note["rows"], strict=True)]
        samples = sorted(sample for note in notes.values() for sample in note["read"])
        loss = sum(loss * row for loss, row in rows) / sum(row for _, row in rows) if len(notes) == count else None
        updates[update].append((samples, loss))
    return updates, [torch.load(path) for path in sorted(folder.glob("end.*"))], job.stderr


@pytest.mark.parametrize("way", some(WAYS, 2, seed=3))
def test_the_others_read_what_was_left(way, launcher):
    ranks, elastic, deaths, keys, environment = WAYS[way]
    expected, (first, *_), _ = trained(launcher, "undisturbed", ranks, elastic, [], keys, environment)
    found, ends, lines = trained(launcher, "disturbed", ranks, elastic, deaths, keys, environment)
    assert lines.count("is lost: killed by signal 9") == len(deaths), lines
    assert len(ends) == (ranks if ":" in elastic else ranks - len(deaths)), lines
    assert found.keys() == expected.keys() == set(range(first["updates"]))
    for update, ((samples, loss),) in expected.items():
        whole = [each for each in found[update] if each[1] is not None]
        for read, computed in whole:
            assert read == samples, (update, lines)
            assert computed == pytest.approx(loss, rel=1e-12, abs=1e-12), (update, lines)
        if not whole:  # the dead rank's part was in the update, of which it could not tell
            assert any(set(read) <= set(samples) for read, _ in found[update])
    for end in ends:
        assert end["rate"] == first["rate"]
        for name, value in first["model"].items():
            torch.testing.assert_close(end["model"][name], value, rtol=1e-12, atol=1e-12)
