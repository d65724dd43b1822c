# SPDX-License-Identifier: Apache-2.0
"""`lamina.Metrics`: what its lines hold, and what takes them."""

import json
import sys
import types

import pytest
import torch

import lamina


class Kept:
    """A logger that keeps what it was given."""

    def __init__(self):
        self.lines, self.closed = [], False

    def log(self, step, values):
        self.lines.append((step, dict(values)))

    def close(self):
        self.closed = True


@lamina.step
def work(x):
    return x.square().sum()


def lines_of(folder):
    return [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]


def test_a_line_says_what_the_steps_since_the_last_one_did(start, tmp_path):
    with lamina.Metrics(tmp_path / "new") as metrics:
        for loss in (2.0, 1.0):
            work(torch.ones(8, 100))
            returned = metrics.step(samples=8, tokens=800, loss=loss)
        metrics.step()
    first, second, idle = lines_of(tmp_path / "new")
    assert (first["step"], second["step"], first["loss"], second["loss"]) == (0, 1, 2.0, 1.0)
    assert second == {"step": 1, **returned}
    assert 0 < second["step_s"] <= second["time_s"] and 0 <= second["bubble"] < 1
    assert second["samples_per_s"] == pytest.approx(8 / second["time_s"])
    assert second["tokens_per_s"] == pytest.approx(800 / second["time_s"])
    assert second["memory_bytes"] > 1 << 20 and second["messages"] == second["sent_bytes"] == 0
    assert idle["step_s"] == idle["bubble"] == 0 and "samples_per_s" not in idle


def test_a_logger_gets_every_line_and_is_closed(start, tmp_path):
    kept = Kept()
    with lamina.Metrics(tmp_path, loggers=[kept]) as metrics:
        work(torch.ones(8, 1))
        line = metrics.step(samples=8)
        assert not kept.closed
    assert kept.lines == [(0, line)] and kept.closed


def test_the_summary_leaves_the_first_step_out(start, tmp_path, capsys):
    metrics = lamina.Metrics(tmp_path)
    for _ in range(4):
        work(torch.ones(8, 1))
        metrics.step(samples=8)
    text = metrics.close()
    assert text.startswith("metrics of 3 steps: ") and "samples/s" in text and "tokens" not in text
    assert capsys.readouterr().out == text + "\n"
    assert metrics.close() == ""


def test_without_a_step_the_summary_says_so(start, tmp_path):
    assert lamina.Metrics(tmp_path).close() == "metrics of no step"


def test_an_error_closes_the_loggers_and_says_nothing(start, tmp_path, capsys):
    kept = Kept()
    with pytest.raises(ZeroDivisionError), lamina.Metrics(tmp_path, loggers=[kept]) as metrics:
        work(torch.ones(8, 1))
        metrics.step()
        raise ZeroDivisionError
    assert kept.closed and capsys.readouterr().out == "" and len(lines_of(tmp_path)) == 1
    with pytest.raises(lamina.UsageError, match="closed"):
        metrics.step()


def test_before_init_it_is_refused(tmp_path):
    with pytest.raises(lamina.UsageError, match="init"):
        lamina.Metrics(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_tensorboard_gets_a_scalar_per_number(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(torch.utils, "tensorboard", module, raising=False)
    board = lamina.TensorBoard(tmp_path / "runs")
    assert not written
    board.log(3, {"loss": 0.5})
    board.close()
    assert written == [str(tmp_path / "runs"), ("loss", 0.5, 3), "closed"]


def test_without_tensorboard_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    with pytest.raises(lamina.ConfigError, match=r"lamina\[tensorboard\]"):
        lamina.TensorBoard(tmp_path)
