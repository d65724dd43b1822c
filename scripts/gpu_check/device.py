# SPDX-License-Identifier: Apache-2.0
"""The device that is checked: of the type that LAMINA_DEVICE names, else the accelerator that torch sees. As a program:
says which one, or that there is none, and exits with 1."""

import importlib
import os
import sys
import time

import torch


def find() -> torch.device | None:
    kind = os.environ.get("LAMINA_DEVICE", "auto").partition(":")[0]
    if kind not in ("auto", "cpu"):
        try:
            torch.device(kind)
        except RuntimeError:  # torch learns of it from a module of that name
            importlib.import_module(kind)
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and kind in ("auto", found.type) else None


def name(device: torch.device) -> str:
    """The device's name where its module tells one."""
    asked = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)
    return f"{device.type} ({asked()}, {torch.accelerator.device_count()} of them)"


class Busy:
    """Work for the current stream that takes about as long as is asked."""

    def __init__(self, device: torch.device, size: int = 512):
        self._a = torch.randn(size, size, device=device)
        self._round_ms = 0.1
        for rounds in (3, 20):  # the first ones make a context and load kernels
            begin = time.perf_counter()
            self._run(rounds)
            torch.accelerator.synchronize()
            self._round_ms = (time.perf_counter() - begin) * 1e3 / rounds

    def _run(self, rounds: int) -> None:
        a = self._a
        for _ in range(rounds):
            a = torch.mm(a, self._a, out=torch.empty_like(a)).clamp_(-1, 1)

    def __call__(self, ms: float) -> None:
        self._run(max(1, round(ms / self._round_ms)))


def main() -> int:
    try:
        device = find()
    except ImportError as missing:
        print(f"LAMINA_DEVICE={os.environ['LAMINA_DEVICE']}: {missing}; nothing was checked", file=sys.stderr)
        return 1
    if device is None:
        asked = f" (LAMINA_DEVICE={os.environ['LAMINA_DEVICE']})" if "LAMINA_DEVICE" in os.environ else ""
        print(f"there is no GPU here: torch {torch.__version__} sees none{asked}; nothing was checked", file=sys.stderr)
        return 1
    print(f"{name(device)}, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
