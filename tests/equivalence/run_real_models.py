# SPDX-License-Identifier: Apache-2.0
"""Runs every model of real_models; each rank writes a JSON line per model with what is wrong on it.

lamina run -n 2 tests/equivalence/run_real_models.py gpt2     prints what is wrong with one
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence.real_models import MODELS, check


def verdict(model) -> list[str]:
    try:
        return check(model)
    except Exception:
        return [traceback.format_exc()]


def main() -> None:
    if chosen := sys.argv[1:]:
        for model in MODELS:
            if model.name in chosen:
                print(model.name, *verdict(model), sep="\n  ", flush=True)
        return
    with Path(os.environ["DIR"], f"wrong-{os.environ['RANK']}").open("w", buffering=1) as file:
        for model in MODELS:
            print(json.dumps([model.name, verdict(model)]), file=file)


if __name__ == "__main__":
    main()
