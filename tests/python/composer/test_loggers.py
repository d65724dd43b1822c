# SPDX-License-Identifier: Apache-2.0
import io
import os
import pty
import subprocess
import sys
import types

import pytest
import torch

import lamina
from lamina.errors import ConfigError, FileError
from lamina.trainer import Logger, State, Timestamp, loggers
from lamina.trainer.loggers import progress_bar_logger
from lamina.trainer.loggers.tap import Tap


class Stream(io.StringIO):
    """A stream that a logger may change, and pytest's own stay as they are."""


def with_streams(monkeypatch):
    """Gives sys.stdout and sys.stderr others, within a test: pytest sets them when one begins."""
    made = Stream(), Stream()
    monkeypatch.setattr(sys, "stdout", made[0])
    monkeypatch.setattr(sys, "stderr", made[1])
    return made


@pytest.fixture
def state():
    made = State(None, "run", 0)
    made.max_duration, made.dataloader_len, made.dataloader_label = "2ep", 3, "train"
    return made


def test_a_file_has_output_from_construction_on_metrics_and_what_is_constant(monkeypatch, state, tmp_path):
    streams = with_streams(monkeypatch)
    logger = loggers.FileLogger(f"{tmp_path}/{{run_name}}/{{rank}}-of-{{world_size}}.txt")
    print("before", "the Trainer")
    logger.init(state, None)
    assert logger.filename == f"{tmp_path}/run/0-of-1.txt"
    print("half a line", end="")
    print("an error", file=sys.stderr)
    logger.log_metrics({"loss": torch.tensor(0.25), "count": 3}, 7)
    print(", and its end\n\nnext", end="")
    logger.log_hyperparameters({"name": "x", "sizes": [1, 2.5], "nested": {"a": None}})
    logger.log_traces({"seen": torch.zeros(2)})
    logger.batch_end(state, None)
    logger.close(state, None)
    print("after")
    assert (tmp_path / "run" / "0-of-1.txt").read_text() == (
        "[stdout]: before the Trainer\n"
        "[stderr]: an error\n"
        "[metric][batch=7]: loss: 0.2500 \n"
        "[metric][batch=7]: count: 3 \n"
        "[stdout]: half a line, and its end\n"
        "\n"
        '[hyperparameter]: name: "x" \n'
        "[hyperparameter]: sizes: [1, 2.5000] \n"
        '[hyperparameter]: nested: { "a": None, } \n'
        "[trace]: seen:Tensor of shape torch.Size([2])\n"
        "[stdout]: next\n"
    )
    assert streams[0].getvalue() == "before the Trainer\nhalf a line, and its end\n\nnextafter\n"
    assert all("write" not in vars(stream) for stream in streams)


def test_what_is_not_wanted_is_not_in_the_file(monkeypatch, state, tmp_path):
    with_streams(monkeypatch)
    logger = loggers.FileLogger(f"{tmp_path}/log", capture_stdout=False, log_traces=False)
    logger.init(state, None)
    print("out")
    print("err", file=sys.stderr)
    logger.log_traces({"seen": 1})
    logger.close(state, None)
    assert (tmp_path / "log").read_text() == "[stderr]: err\n"


def test_a_file_that_is_there_stays_unless_it_may_go(monkeypatch, state, tmp_path):
    with_streams(monkeypatch)
    (tmp_path / "log").write_text("kept\n")
    with pytest.raises(ConfigError, match=r"log is there: overwrite=True"):
        loggers.FileLogger(f"{tmp_path}/log").init(state, None)
    assert (tmp_path / "log").read_text() == "kept\n"
    logger = loggers.FileLogger(f"{tmp_path}/log", overwrite=True)
    for text in ("first", "second"):  # of two Trainers, which goes on
        logger.init(state, None)
        print(text)
        logger.close(state, None)
    assert (tmp_path / "log").read_text() == "[stdout]: first\n[stdout]: second\n"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_in_the_place_of_its_file_is_not_followed(state, tmp_path, overwrite):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "log").symlink_to("precious")
    with pytest.raises((FileError, ConfigError), match="it is a link" if overwrite else "is there"):
        loggers.FileLogger(f"{tmp_path}/log", overwrite=overwrite).init(state, None)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("name", ["{ran}.txt", "{rank", "{0}", "{rank.x}"])
def test_a_name_that_has_no_meaning_is_refused_at_once(name):
    with pytest.raises(ConfigError, match=r"filename=.*names are run_name, rank, local_rank"):
        loggers.FileLogger(name)
    with pytest.raises(ConfigError, match="not uploaded"):
        loggers.FileLogger(remote_file_name="x")


def test_a_trainer_that_fails_leaves_the_traceback_in_the_file(monkeypatch, state, tmp_path):
    with_streams(monkeypatch)
    logger = loggers.FileLogger(f"{tmp_path}/log")
    logger.init(state, None)
    try:
        raise ValueError("of the script")
    except ValueError:
        logger.close(state, None)
    text = (tmp_path / "log").read_text()
    assert text.startswith("[stderr]: Traceback") and "[stderr]: ValueError: of the script\n" in text


SCRIPT = """
import sys
from lamina.trainer import State, loggers
logger = loggers.FileLogger(sys.argv[1])
logger.init(State(None, "run", 0), None)
heavy = {"torchmetrics", "rich", "wandb", "tensorboard"}
print("imported", sorted(heavy & set(sys.modules)), end="")
raise ValueError("of the script")
"""


def test_a_script_that_nobody_closes_leaves_all_in_the_file_and_imports_nothing_heavy(tmp_path):
    run = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "log"], capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == "imported []"
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0].startswith("[stderr]: Traceback") and "[stderr]: ValueError: of the script" in lines
    assert lines[-1] == "[stdout]: imported []"


def test_taps_leave_in_any_order():
    for order in ((0, 1), (1, 0)):
        stream, heard = Stream(), ([], [])
        taps = [Tap(stream, each.append) for each in heard]
        stream.write("a")
        taps[order[0]].close()
        stream.write("b")
        taps[order[1]].close()
        stream.write("c")
        assert stream.getvalue() == "abc" and [len(each) for each in heard] == [2 - (i == order[0]) for i in (0, 1)]
    assert "write" not in vars(stream)


def test_memory_has_values_with_their_times(state):
    logger = loggers.InMemoryLogger()
    logger.init(state, None)
    logger.log_hyperparameters({"a": 1})
    for batch in (1, 2):
        state.timestamp = Timestamp(batch=batch, sample=4 * batch)
        logger.log_metrics({"loss": 0.5 / batch, "batches": batch}, batch)
    state.timestamp = Timestamp(epoch=1)
    series = logger.get_timeseries("loss")
    assert series["loss"].tolist() == [0.5, 0.25] and series["sample"].tolist() == [4, 8]
    assert series["total_wct"].tolist() == [0, 0] and logger.hyperparameters == {"a": 1}
    assert logger.data["batches"] == [(Timestamp(batch=b, sample=4 * b), b) for b in (1, 2)]
    assert logger.most_recent_values == {"loss": 0.25, "batches": 2}
    assert logger.most_recent_timestamps["loss"].batch == 2
    with pytest.raises(lamina.Error, match="no metric 'other' was logged; there are loss, batches"):
        logger.get_timeseries("other")


class Lines:
    def __init__(self):
        self.lines, self.closed = [], False

    def log(self, step, values):
        self.lines.append((step, dict(values)))

    def close(self):
        self.closed = True


def test_any_logger_of_lamina_is_a_destination(state, monkeypatch):
    lines, memory = Lines(), loggers.InMemoryLogger()
    destinations = loggers.as_destinations([lines, memory])
    logger = Logger(state, destinations)
    state.timestamp = Timestamp(batch=5)
    logger.log_metrics({"a": 1, "b": torch.tensor(2.5), "c": "text", "d": torch.zeros(2)})
    logger.log_metrics({"a": 2}, 9)
    logger.log_hyperparameters({"h": 1})
    logger.log_traces({"t": 1})
    assert lines.lines == [(5, {"a": 1.0, "b": 2.5}), (9, {"a": 2.0})]
    assert memory.hyperparameters == {"h": 1} and memory.data["c"][0][1] == "text"
    assert logger.destinations == destinations
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger.log_metrics({"a": 3})
    assert len(lines.lines) == 2 and memory.most_recent_values["a"] == 3
    destinations[0].close(state, logger)
    assert lines.closed and loggers.as_destinations(None) == [] and loggers.as_destinations(memory) == [memory]
    for wrong in (3, Lines, "tensorboard"):
        with pytest.raises(ConfigError, match="is none: a LoggerDestination is"):
            loggers.as_destinations(wrong)


class Recorded:
    """Stands for a writer or a run, which notes how it is called."""

    def __init__(self, *args, **kwargs):
        self.calls = [("made", args, kwargs)]
        self.config = types.SimpleNamespace(update=lambda values: self.calls.append(("config", values)))

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_tensorboard_gets_what_can_be_drawn_on_rank_0(monkeypatch, state, tmp_path):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Recorded
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(torch.utils, "tensorboard", module, raising=False)
    logger = loggers.TensorboardLogger(str(tmp_path), flush_interval=2)
    logger.init(state, None)
    writer = logger.writer
    logger.log_metrics({"loss": 0.5, "name": "x"}, 3)
    logger.log_hyperparameters({"lr": 0.1})
    for batch in (1, 2):
        state.timestamp = Timestamp(batch=batch)
        logger.batch_end(state, None)
    logger.close(state, None)
    assert writer.calls == [
        ("made", (f"{tmp_path}/run",), {}),
        ("add_scalar", ("loss", 0.5, 3), {}),
        ("add_text", ("lr", "0.1000"), {}),
        ("flush", (), {}),
        ("close", (), {}),
    ]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank_zero_only in (True, False):
        logger = loggers.TensorboardLogger(rank_zero_only=rank_zero_only)
        logger.init(state, None)
        assert (logger.writer is None) == rank_zero_only
        logger.log_metrics({"loss": 1.0}, 1)
        logger.fit_end(state, None)
        logger.close(state, None)


def test_wandb_gets_a_run_on_rank_0_or_one_on_each(monkeypatch, state):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=Recorded))
    logger = loggers.WandBLogger(project="p", tags=["t"], init_kwargs={"mode": "offline"})
    logger.init(state, None)
    run = logger.run
    logger.log_metrics({"loss": torch.tensor(0.5)}, 3)
    logger.log_hyperparameters({"lr": 0.1})
    logger.close(state, None)
    assert run.calls == [
        ("made", (), {"name": "run", "mode": "offline", "project": "p", "tags": ["t"]}),
        ("log", ({"loss": 0.5},), {"step": 3}),
        ("config", {"lr": 0.1}),
        ("finish", (), {"exit_code": 0}),
    ]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger = loggers.WandBLogger(name="n", rank_zero_only=False)
    logger.init(state, None)
    assert logger.run.calls == [("made", (), {"group": "n", "name": "n-rank1"})]
    alone = loggers.WandBLogger()
    alone.init(state, None)
    assert alone.run is None
    with pytest.raises(ConfigError, match="not uploaded"):
        loggers.WandBLogger(log_artifacts=True)


@pytest.mark.parametrize(
    ("name", "module"), [("TensorboardLogger", "torch.utils.tensorboard"), ("WandBLogger", "wandb")]
)
def test_a_service_that_is_not_installed_says_how_it_is(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    with pytest.raises(ConfigError, match="is not installed: pip install"):
        getattr(loggers, name)()


def test_a_console_has_metrics_of_the_interval(state, monkeypatch):
    stream = Stream()
    logger = loggers.ConsoleLogger("2ba", stream)
    logger.log_hyperparameters({"seed": 1})
    for batch in range(1, 5):
        state.timestamp = Timestamp(batch=batch, batch_in_epoch=batch)
        logger.log_metrics({f"m{batch}": batch / 2})
        logger.batch_end(state, None)
    state.eval_metric_values, state.dataloader_label = {"accuracy": 0.5}, "eval"
    logger.eval_end(state, None)
    logger.log_traces({"unseen": 1})
    expected = (
        "Config:\n\t seed: 1\n[epoch=1][batch=1/3]:\n\t Train m1: 0.5000\n"
        "[epoch=1][batch=2/3]:\n\t Train m2: 1.0000\n"
        "[epoch=1][batch=4/3]:\n\t Train m3: 1.5000\n\t Train m4: 2.0000\n"
        "[Eval on eval]:\n\t Eval accuracy: 0.5000\n"
    )
    assert stream.getvalue() == expected
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger.eval_end(state, None)
    assert stream.getvalue() == expected
    for wrong in ("1sp", 0, "1h"):
        with pytest.raises(ConfigError, match="some epochs"):
            loggers.ConsoleLogger(wrong)
    with pytest.raises(ConfigError, match=r"stream: .standard. is none"):
        loggers.ConsoleLogger(stream="standard")


def test_epochs_on_a_console_and_other_durations(state):
    stream = Stream()
    logger = loggers.ConsoleLogger(1, stream)
    state.timestamp = Timestamp(epoch=1, batch=3)
    logger.batch_end(state, None)
    logger.epoch_end(state, None)
    state.max_duration = "40sp"
    state.timestamp = Timestamp(epoch=2, batch=6, sample=24)
    logger.epoch_end(state, None)
    assert stream.getvalue() == "[epoch=1][batch=3/3]:\n[sample=24/40]:\n"


def test_without_a_terminal_progress_is_a_line_each_ten_seconds_and_at_each_end(state, monkeypatch):
    stream, now = Stream(), 100.0
    monkeypatch.setattr(progress_bar_logger.time, "monotonic", lambda: now)
    logger = loggers.ProgressBarLogger(stream)
    logger.fit_start(state, None)
    for batch, now in enumerate((104.0, 110.0, 112.0), 1):  # noqa: B007
        state.timestamp = Timestamp(batch=batch, batch_in_epoch=batch)
        logger.log_metrics({"loss/train/total": batch / 2, "epoch": 0})
        logger.batch_end(state, None)
    logger.eval_start(state, None)
    state.dataloader_label, state.dataloader_len, now = "other", None, 132.0
    logger.eval_batch_end(state, None)
    logger.log_metrics({"metrics/other/accuracy": 0.25})
    now = 133.0
    logger.eval_end(state, None)
    logger.close(state, None)
    assert stream.getvalue() == (
        "epoch 1 of 2, batch 2 of 3, 0.2 batches a second, loss/train/total 1.0000\n"
        "epoch 1 of 2, batch 3 of 3, 0.5 batches a second, loss/train/total 1.5000\n"
        "evaluation of other, batch 1, 0.05 batches a second\n"
        "evaluation of other, batch 1 of 1, metrics/other/accuracy 0.2500\n"
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    now = 200.0
    logger.fit_start(state, None)
    now = 300.0
    logger.batch_end(state, None)
    assert stream.getvalue().count("\n") == 4


BAR = """
import sys, time
from lamina.trainer import State, Timestamp, loggers
file = loggers.FileLogger(sys.argv[1])
bar, state = loggers.ProgressBarLogger(), State(None, "run", 0)
state.max_duration, state.dataloader_len = "1ep", 3
file.init(state, None)
bar.fit_start(state, None)
for batch in range(1, 4):
    state.timestamp = Timestamp(batch=batch, batch_in_epoch=batch)
    bar.log_metrics({"loss/train/total": 0.5})
    time.sleep(0.11)
    bar.batch_end(state, None)
    print(f"printed {batch}")
bar.close(state, None)
print("the end")
"""


def screen_of(written):
    """The lines of a terminal that was told to move up, to erase a line, to go to its beginning, and text."""
    import re

    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            rows[row] = ""
        elif not part.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
            column += len(part)
    return [text.rstrip() for text in rows]


def test_a_bar_stays_below_what_is_printed_and_out_of_files(tmp_path):
    own, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "20"}
    script = [sys.executable, "-c", BAR, tmp_path / "log"]
    with subprocess.Popen(script, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as run:
        os.close(theirs)
        written = b""
        try:
            while more := os.read(own, 65536):
                written += more
        except OSError:  # its end
            pass
    os.close(own)
    text = written.decode()
    assert run.returncode == 0, text
    assert all("epoch 1 of 1" in text and f"{batch}/3" in text for batch in (1, 2, 3)) and "total 0.5000" in text
    assert [line for line in screen_of(text) if line] == ["printed 1", "printed 2", "printed 3", "the end"]
    printed = [f"[stdout]: printed {batch}\n" for batch in (1, 2, 3)]
    assert (tmp_path / "log").read_text() == "".join([*printed, "[stdout]: the end\n"])
