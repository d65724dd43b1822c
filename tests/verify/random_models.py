# SPDX-License-Identifier: Apache-2.0
"""Has `lamina verify` compare many random models and layouts, none of which may differ.

    python tests/verify/random_models.py [--layout RANKSxPARTITIONS] [--keep FOLDER] FIRST LAST | NUMBER

Each case of a layout is recorded in one launch, and again in another one without the layout. Prints what differs, what
failed, and which tensors of the run without the layout nobody has seen in the layout.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from launch.launcher_harness import command
from verify.run_faults import Run, run

LAYOUTS = ((2, 2), (2, 1), (3, 3), (4, 2), (4, 1))


# On a rank.


def record(folder: Path, world: int, partitions: int, first: int, last: int) -> None:
    from verify.drawn import draw

    side = "layout" if int(os.environ["WORLD_SIZE"]) == world and not _collapsed() else "plain"
    for number in range(first, last):
        case = draw(number, world, partitions)
        place = folder / str(number) / side
        place.mkdir(parents=True, exist_ok=True)
        os.environ |= {"LAMINA_VERIFY_FOLDER": str(place), "LAMINA_VERIFY_STEPS": "100"}
        try:
            train(case)
        except Exception:
            (place / f"failed-{os.environ['RANK']}").write_text(f"{case.name}\n{traceback.format_exc()}")


def _collapsed() -> bool:
    return "LAMINA_VERIFY_COLLAPSED" in os.environ


def train(case) -> None:
    import torch

    import lamina

    torch.manual_seed(case.number)
    if case.random is not None:
        from equivalence.random_sides import distributed
        from verify.drawn import OPTIMIZERS

        distributed(case.random, OPTIMIZERS[case.optimizer], **case.keys)
        return
    lamina.init(**case.keys)
    try:
        _train(case)
    finally:
        lamina.shutdown()


def _train(case) -> None:
    import torch
    from verify import real
    from verify.drawn import KINDS, OPTIMIZERS, ROWS, STEPS, WIDTH

    import lamina

    module = KINDS[case.model]() if case.model in KINDS else real.MODELS[case.model].build()
    module = module.to(torch.float64 if case.dtype == "float64" else torch.float32)
    if case.by_hand:
        place_by_hand(module, case.number)
    model = lamina.DistributedModel(module)
    scale = {"static_loss_scale": 64.0} if case.dtype == "float16" else {}
    optimizer = lamina.DistributedOptimizer(OPTIMIZERS[case.optimizer](model.parameters()), **scale)

    def forward(batch):
        return model(batch["x"]) if "x" in batch else model(**batch).loss.float()

    @lamina.step
    def step(batch):
        loss = forward(batch)
        model.backward(loss)
        return loss

    def loop(batch):
        model.backward(forward(batch))

    for number in range(STEPS):
        seed = case.number * 1000 + number * 10 + lamina.dp_rank()
        if case.model in KINDS:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
            batch = {"x": x.double() if case.dtype == "float64" else x.float()}
        else:
            batch = real.batch_of(case.model, seed)
        optimizer.zero_grad()
        (loop if case.loop else step)(batch)
        if case.clip:
            optimizer.clip_master_grads(0.05) if case.dtype in ("float16", "bfloat16") else model.clip_grad_norm_(0.05)
        optimizer.step()


def place_by_hand(model, seed: int) -> None:
    """Every module anywhere; those that share a parameter together."""
    import lamina

    draw, together = random.Random(seed), {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        partition = next((together[p] for p in own if p in together), draw.randrange(lamina.pp_size()))
        together.update({p: partition for p in own})
        lamina.set_partition(module, partition)


# The program that starts them.


def missing(first: Path, second: Path) -> Counter:
    """Counts, by kind and module, tensors that the second run has seen and the first one has not, under any name. What
    a module hands on of another rank's is recorded there, of the module that made it. Parts that a checkpoint runs
    again are left out."""
    seen, values = set(), defaultdict(list)
    for line in _lines(first):
        seen.add(_key(line))
        values[_place(line)].append(line["digest"][4])
    lost = (line for line in _lines(second) if line["call"] >= 0 and _key(line) not in seen)
    return Counter(
        (line["kind"], line["name"])
        for line in lost
        if not any(_are_near(line["digest"][4], other) for other in values[_place(line)])
    )


def _place(line: dict) -> tuple:
    return line["step"], line["microbatch"], tuple(line["digest"][1])


def _are_near(one: float | None, other: float | None) -> bool:
    return one == other or (None not in (one, other) and abs(one - other) <= 1e-2 * max(one, other))


def _lines(folder: Path):
    for path in folder.glob("rank-*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if "kind" in line:
                yield line


def _key(line: dict) -> tuple:
    return tuple(line[name] for name in ("step", "microbatch", "kind", "name", "call", "index"))


def launch(folder: Path, world: int, partitions: int, first: int, last: int, run: Run) -> list[str]:
    """The lines about the cases, one each at least."""
    words = [__file__, "--layout", f"{world}x{partitions}", "--keep", str(folder), str(first), str(last)]
    run(world, words, {})
    run(world // partitions, words, {"LAMINA_VERIFY_COLLAPSED": "1"})
    return [line for number in range(first, last) for line in compare(folder / str(number))]


def is_well(line: str) -> bool:
    return " equal: " in line or " refused: " in line


def compare(folder: Path) -> list[str]:
    """The lines about one case."""
    layout, plain = folder / "layout", folder / "plain"
    failed = [path for side in (layout, plain) for path in side.glob("failed-*")]
    if failed and all("[shard-away]" in path.read_text() for path in failed):
        return [f"{folder.name}: refused: a module reads what is another one's, and sharded"]
    if failed:
        return [f"{folder.name}: failed: {path.parent.name}/{path.name}: {path.read_text()}" for path in failed]
    done = subprocess.run([command(), "verify", "--compare", layout, plain], capture_output=True, text=True)
    word = {0: "equal", 3: "DIFFERS"}.get(done.returncode, "FAILED")
    lines = [f"{folder.name}: {word}: {(done.stdout + done.stderr).strip()}"]
    if lost := missing(layout, plain):
        lines.append(f"{folder.name}: not seen in the layout: {dict(lost.most_common(12))}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layout")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("numbers", type=int, nargs="+")
    options = parser.parse_args()
    first, last = options.numbers[0], options.numbers[-1] + (len(options.numbers) == 1)
    layouts = LAYOUTS if options.layout is None else [tuple(map(int, options.layout.split("x")))]
    if "RANK" in os.environ:
        return record(options.keep, *layouts[0], first, last)
    from verify.drawn import draw

    with tempfile.TemporaryDirectory() as temporary:
        for world, partitions in layouts:
            folder = (options.keep or Path(temporary)) / f"{world}x{partitions}"
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(first, last):
                print(draw(number, world, partitions).name)
            print(*launch(folder, world, partitions, first, last, run), sep="\n", flush=True)


if __name__ == "__main__":
    main()
