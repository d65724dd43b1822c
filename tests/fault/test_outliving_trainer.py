# SPDX-License-Identifier: Apache-2.0
"""Copies that a Trainer trains, of which some are killed: the others go on, with the numbers of one process, and each
sample of an epoch once."""

import functools
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from fault.beside import Beside
from launch.launcher_harness import PRELOAD, eventually
from soak import paired, some

PROGRAM = Path(__file__).with_name("outliving_trainer.py")
sys.path.insert(0, str(PROGRAM.parent))
BOUND_S = 5.0  # from a death until the others go on

EVENTS = ("fit_start", "epoch_start", "before_dataloader", "after_dataloader", "batch_start", "after_train_batch")
EVENTS += ("batch_end", "eval_start", "eval_batch_end", "eval_end", "batch_checkpoint", "epoch_end", "fit_end")
NUMBERS = {"fit_start": 0, "epoch_start": 6, "eval_start": 3, "epoch_end": 6, "epoch_checkpoint": 6, "fit_end": 12}
PLACES = [*EVENTS, "forward", "gradient", "update", "updated", "evaluation"]
WAYS = ("workers", "rows", "cut", "rows cut", "torchdata", "memory", "measured")
EVERY = [(place, victim) for place in PLACES for victim in (0, 1, 3)]


def number_in(place):
    return NUMBERS.get(place, 3)


def started(launcher, ranks, way, place, *deaths, **variables):
    env = {"LAMINA_ELASTIC": "1"} | {name: None if value is None else str(value) for name, value in variables.items()}
    return launcher.start_ranks(ranks, PROGRAM, way, place, *deaths, env=env)


def ends(launcher, ranks, way, place, *deaths, **variables):
    """Returns what those who are left have written, by the ranks that they had first, and what all said."""
    dead = {int(each.partition(":")[0]) for each in deaths}
    processes = started(launcher, ranks, way, place, *deaths, **variables)
    with Beside(processes) as beside:
        outputs = [rank.communicate(timeout=90)[1] for rank in processes]
    assert [each.returncode for each in processes] == [-9 if rank in dead else 0 for rank in range(ranks)], outputs
    found = {rank: torch.load(launcher.folder / f"end.{rank}", weights_only=False) for rank in set(range(ranks)) - dead}
    last = max(json.loads(path.read_text())["at"] for path in launcher.folder.glob("death-*"))
    assert all(end["went_on"][-1] - last < beside.scaled(BOUND_S) for end in found.values())
    return found, [line for output in outputs for line in output.splitlines()]


@functools.cache
def undisturbed(way, copies):
    """Has one process do what so many copies do."""
    import outliving_trainer

    return outliving_trainer.trained(*outliving_trainer.trainer_of(way, 1, outliving_trainer.BATCHES[copies]))


def require_numbers(end, one, of):
    """Losses, rates and metrics of the batches that `of` has, model and states are those of one process."""
    pairs = [(end[name][number], one[name][number]) for name in ("losses", "rates", "metrics") for number in of[name]]
    pairs += [(end["model"][name], value) for name, value in one["model"].items() if name != "forwards"]
    pairs += [
        (end["optimizer"][at][key], value) for at, each in one["optimizer"].items() for key, value in each.items()
    ]
    pairs.append((end["eval"], one["eval"]))
    for own, its in pairs:
        torch.testing.assert_close(torch.as_tensor(own), torch.as_tensor(its), rtol=1e-12, atol=1e-12)
    assert end["is_scripts_own"]


def require_undisturbed(found, ranks, way="plain", of=4):
    one = undisturbed(way, of)
    for end in found.values():
        assert end["size"] == ranks
        assert end["read"] == one["read"]
        assert end["losses"].keys() == one["losses"].keys()
        require_numbers(end, one, of=one)


def undisturbed_copies(launcher, ranks, way):
    """Has so many ranks train, whose microbatches no single process has."""
    outputs = [rank.communicate(timeout=90) for rank in started(launcher, ranks, way, "none", str(ranks))]
    found = [torch.load(launcher.folder / f"end.{rank}", weights_only=False) for rank in range(ranks)]
    return found[0] | {"outputs": outputs}


def require_said_once(lines, number, *ranks):
    said = [line for line in lines if line.startswith("lamina: lost rank")]
    assert len(said) == 1, lines
    names = ", ".join(map(str, ranks))
    assert said[0].startswith(f"lamina: lost rank{'s' * (len(ranks) > 1)} {names} (machine "), said
    assert f" in step {number}: " in said[0], said


@pytest.mark.parametrize(("place", "victim"), some(EVERY, 5, seed=4))
def test_four_copies_go_on_as_three_wherever_one_is_killed(place, victim, launcher):
    number = number_in(place)
    found, lines = ends(launcher, 4, "plain", place, f"{victim}:{number}")
    require_undisturbed(found, 3)
    assert sum(line.startswith("lamina: lost rank") for line in lines) == 1, lines


@pytest.mark.parametrize(("way", "place"), some([(way, place) for way in WAYS for place in ("forward", "update")], 3))
def test_rows_microbatches_and_workers_go_on(way, place, launcher):
    found, lines = ends(launcher, 4, way, place, "2:4")
    eventually(lambda: not launcher.processes())  # workers of the killed one look for it each 5 s
    require_undisturbed(found, 3, way)
    require_said_once(lines, 4 if place == "forward" else 5, 2)  # others make the update, too


@pytest.mark.parametrize("behind", [0, 2])
def test_an_update_that_one_has_made_counts_for_all(behind, launcher):
    found, lines = ends(launcher, 3, "plain", "behind", "1", BEHIND=behind)
    require_undisturbed(found, 2, of=3)
    require_said_once(lines, 3, 1)


@pytest.mark.parametrize("deaths", [("0", "3"), ("1:2", "0:7"), ("2:5", "1:6"), ("4:0", "2:11")])
def test_copies_are_lost_at_once_or_one_after_the_other(deaths, launcher):
    found, _ = ends(launcher, 5, "plain", "forward", *deaths)
    require_undisturbed(found, 3, of=5)


def test_one_is_lost_while_others_go_on_without_another_one(launcher):
    found, lines = ends(launcher, 5, "plain", "going on", "0", "3::forward")
    require_undisturbed(found, 3, of=5)
    require_said_once(lines, 3, 0, 3)


SAVES = [("plain", place) for place in ("saving", "saved", "batch_checkpoint", "forward")] + [("torchdata", "saved")]


@pytest.mark.parametrize(("way", "place"), SAVES)
def test_a_checkpoint_that_was_being_saved_is_saved_again(way, place, launcher):
    require_saved_again(launcher, way, place)


def require_saved_again(launcher, way, place):
    """Where a rank dies there, each batch of the training has its checkpoint."""
    folder = launcher.folder / "saves"
    found, _ = ends(launcher, 4, way, place, "1", SAVES=folder)
    require_undisturbed(found, 3, way)
    names = [f"ba{number}" for number in range(1, 13)]
    assert {path.name for path in folder.glob("ba*")} == {f"{name}_partial" for name in names}
    for end in found.values():
        assert [Path(each).name for each in end["saved"]] == [*names, "ba12"]  # the last also after its epoch


@pytest.mark.parametrize(("place", "number"), [("batch_end", 3), ("change", 3), ("forward", 2)])
def test_a_change_is_made_without_the_lost_one(place, number, launcher):
    found, _ = ends(launcher, 4, "changes", place, f"1:{number}")
    require_undisturbed(found, 3)


CHANGES = ("changes", "to partitions", "to copies")
AMID = ("change", "changing", "beginning", "cutting", "loading")


@pytest.mark.parametrize(
    ("way", "place"), [*paired(CHANGES, AMID, seed=8), *((way, "reading on") for way in CHANGES[1:])]
)
def test_a_rank_is_lost_amid_a_change(way, place, launcher):
    found, _ = ends(launcher, 4, way, place, f"{len(place) % 4}")
    require_undisturbed(found, 3, way)


CALLS = [("meeting", 12), ("left", 12), ("eval_start", 112), ("evaluation", 112), ("eval_end", 112), ("meeting", 112)]
CALLS += [("left", 112), ("predict_batch_end", 212), ("predict_end", 212), ("meeting", 212), ("left", 212)]
CALLS += [("meeting", 312)]


@pytest.mark.parametrize(("place", "number"), some(CALLS, 4, seed=3))
def test_calls_after_a_training_go_on_without_the_lost_one(place, number, launcher):
    found, _ = ends(launcher, 4, "plain", place, f"{number % 5 % 4}:{number}", CALLS=1)
    require_undisturbed(found, 3)
    if number < 212:
        require_predicted(found)


def require_predicted(found, way="plain", of=4):
    """The outputs of all who are left are those of one process."""
    import outliving_trainer

    trainer, model, *_ = outliving_trainer.trainer_of(way, 1, outliving_trainer.BATCHES[of])
    trainer.close()
    model.load_state_dict(undisturbed(way, of)["model"])
    rows = [row for each in outliving_trainer.evaluator().dataset for row in model.eval()((each[0][None],)).detach()]
    own = [tuple(row.tolist()) for end in found.values() for outputs in end["predicted"] for row in outputs]
    own = own if way == "plain" else set(own)  # partitions of one copy have the same
    expected = torch.stack(sorted(rows, key=torch.Tensor.tolist))
    torch.testing.assert_close(torch.tensor(sorted(own), dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", some(range(40), 2, seed=9))
def test_random_histories(seed, launcher):
    draw = random.Random(seed)
    deaths = []
    for victim in draw.sample(range(5), 2):  # most of the last ones are left each time
        place = draw.choice(PLACES)
        number = NUMBERS[place] if place in NUMBERS else draw.randrange(1, 12)
        if place in ("evaluation", "eval_start", "eval_batch_end", "eval_end"):
            number = draw.choice((3, 6, 9, 12))
        deaths.append(f"{victim}:{number}:{place}")
    way = draw.choice(("plain", *WAYS[1:]))
    found, _ = ends(launcher, 5, way, "none", *deaths)
    require_undisturbed(found, 3, way, of=5)


# Ways, and how many ranks: the copies have microbatches of 2 and 1 samples each, or three where there is room for four.
SHARED = {"rows uneven": 3, "rows with gaps": 5, "rows cut": 5}
LAST = (5, 11)  # batches of an epoch, which are smaller: who has nothing of them repeats an earlier one, with weight 0


@pytest.mark.parametrize("way", SHARED)
@pytest.mark.parametrize("deaths", [("1:2",), ("0:7", "2:8")])
def test_the_copies_that_are_left_draw_the_numbers_of_all_for_the_same_microbatches(way, deaths, launcher):
    ranks = SHARED[way]
    deaths = deaths[: 1 if ranks == 3 else 2]
    one = undisturbed_copies(launcher, ranks, way)
    found, _ = ends(launcher, ranks, way, "forward", *deaths)
    for end in found.values():
        assert end["size"] == ranks - len(deaths)
        assert all(end["read"][number] == one["read"][number] for number in range(12) if number not in LAST)
        require_numbers(end, one, of=one)


def failed(launcher, ranks, way, place, *deaths, elastic=True):
    env = {} if elastic else {"LAMINA_ELASTIC": None}
    processes = started(launcher, ranks, way, place, *deaths, **env)
    outputs = [rank.communicate(timeout=90)[1] for rank in processes]
    dead = {int(each.partition(":")[0]) for each in deaths}
    assert [each.returncode for each in processes] == [-9 if rank in dead else 1 for rank in range(ranks)], outputs
    assert all("PeerError" in output for rank, output in enumerate(outputs) if rank not in dead), outputs
    return [line for output in outputs for line in output.splitlines()]


def test_a_loader_that_splits_itself_ends_the_job_with_a_line(launcher):
    lines = failed(launcher, 4, "stream", "batch_end", "1")
    said = [line for line in lines if line.startswith("lamina: --elastic: a rank is lost, and the others end with it")]
    assert len(said) == 1 and "says itself what each copy" in said[0], lines


def test_without_elastic_a_loss_ends_the_training(launcher):
    lines = failed(launcher, 3, "plain", "forward", "1", elastic=False)
    assert not any("lamina: lost rank" in line or "--elastic" in line for line in lines), lines


def test_the_launcher_lets_a_trainer_go_on(launcher):
    run = launcher.run("run", *PRELOAD, "-n", 3, "--elastic", 2, PROGRAM, "plain", "batch_end", "0")
    assert run.returncode == 0, run.stderr
    require_undisturbed(
        {rank: torch.load(launcher.folder / f"end.{rank}", weights_only=False) for rank in (1, 2)}, 2, of=3
    )
    run = launcher.run("run", *PRELOAD, "-n", 3, PROGRAM, "plain", "forward", "0")
    assert run.returncode == 128 + 9, run.stderr
    assert "lamina: lost rank" not in run.stderr


def test_an_error_of_the_program_ends_the_job(launcher):
    run = launcher.run("run", *PRELOAD, "-n", 3, "--elastic", 1, PROGRAM, "plain", "none", "1:3:error")
    assert run.returncode == 1, run.stderr
    assert "ValueError: of the program" in run.stderr
    assert "lamina: lost rank" not in run.stderr


def test_of_two_the_first_goes_on_alone_and_the_other_one_does_not(launcher):
    found, _ = ends(launcher, 2, "rows", "forward", "1")
    require_undisturbed(found, 1, "rows", of=2)
    lines = failed(launcher, 2, "plain", "forward", "0")
    assert any("[elastic-ended]" in line for line in lines), lines
