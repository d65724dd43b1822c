# SPDX-License-Identifier: Apache-2.0
"""Names places that know a kind of device by its name. What one can do the engine asks of lamina/device, see [Note:
devices] there, and the Python face of torch.accelerator and lamina.device(). A place that has to say a name stands
below, with its reason."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = re.compile(r"\bis_cpu\(|\bis_cuda\(|\bk(?:CPU|CUDA)\b|\bDeviceType::(?:CPU|CUDA)\b|\.cpu\(\)|\.cuda\(\)")
FACE = re.compile(r"""\btorch\.cuda\b|\bis_cuda\b|["']cuda["':]|\.cuda\(""")
ALLOWED = {
    "lamina/collective/hierarchical.cc": "torch's own table of backends, which has a row for each type",
    "python/lamina/job/groups.py": "Gloo takes tensors of CUDA, and of no other accelerator",
    "python/lamina/pipeline/distributed_model.py": "a method of torch's modules that has this name",
}


def files(root: Path) -> Iterator[tuple[Path, re.Pattern[str], str]]:
    """Paths, what names a device there, and what begins a comment."""
    for path in sorted((root / "lamina").rglob("*")):
        if path.suffix in (".h", ".cc") and path.relative_to(root).parts[1] != "device":
            yield path, ENGINE, "//"
    for path in sorted((root / "python" / "lamina").rglob("*.py")):
        yield path, FACE, "#"


def problems(root: Path) -> list[str]:
    found = []
    for path, names, comment in files(root):
        name = path.relative_to(root)
        for number, line in enumerate([] if str(name) in ALLOWED else path.read_text().splitlines(), 1):
            code = line.split(comment)[0]
            if names.search(code):
                ask = "ask lamina/device" if comment == "//" else "ask torch.accelerator or lamina.device()"
                found.append(f"{name}:{number}: names a device; {ask} what it can do: {code.strip()}")
    return found


if __name__ == "__main__":
    found = problems(ROOT)
    print("\n".join(found))
    sys.exit(bool(found))
