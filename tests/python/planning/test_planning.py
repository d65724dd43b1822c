# SPDX-License-Identifier: Apache-2.0
"""The costs of a model that nobody has built yet."""

import json
import subprocess
import sys

import pytest
import torch
from launch.launcher_harness import command
from soak import some
from torch import nn

import lamina
from lamina.errors import UsageError
from lamina.planning.cli import arguments, find, plan_of
from lamina.planning.first_rank import FirstRank

LINEAR = "torch.zeros(2, 8)"


def rows_of(*words, **options):
    return plan_of(*words, **options)["nodes"]


def by_name(rows):
    return {row["name"]: row for row in rows}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return self.last(self.first(x) * scale) @ self.first.weight


def test_rows_are_those_of_a_plans_file():
    rows = rows_of(Net, [LINEAR])
    assert [row["name"] for row in rows] == ["", "first", "last"]
    assert [row["parent"] for row in rows] == [None, 0, 0] and [row["id"] for row in rows] == [0, 1, 2]
    assert rows[0]["together"] == [1] and "placed_at" not in rows[0]
    assert rows[1]["parameter_bytes"] == 288 and rows[1]["forward_us"] > 0 and rows[1]["backward_us"] > 0
    json.dumps(rows)


def test_a_model_too_large_for_any_machine():
    rows = by_name(rows_of(lambda: nn.Sequential(nn.Linear(2**20, 2**22), nn.ReLU()), ["torch.zeros(4, 2**20)"]))
    assert rows["0"]["parameter_bytes"] > 2**44 and rows["0"]["forward_us"] > 1e8


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if x.sum() == 0 else x


def test_a_model_that_reads_data_is_built_and_run():
    assert by_name(rows_of(Branches, [LINEAR]))["linear"]["forward_us"] > 0
    assert by_name(rows_of(Branches, ["torch.ones(2, 8)"]))["linear"]["forward_us"] == 0


def test_a_model_whose_building_reads_data(capfd):
    class Reads(Net):
        def __init__(self):
            super().__init__()
            self.depth = int(torch.rand(3).sum())

    assert by_name(rows_of(Reads, [LINEAR]))["first"]["forward_us"] > 0
    assert "it is built as it is" in capfd.readouterr().err


def test_a_model_that_cannot_be_called_with_its_input_is_an_error_with_what_it_raised():
    with pytest.raises(UsageError, match="cannot be called with what --input gives") as raised:
        rows_of(Net, ["torch.zeros(2, 3)"])
    assert isinstance(raised.value.__cause__, RuntimeError) and "2x3" in str(raised.value.__cause__)


def test_without_an_input_a_model_is_planned_by_its_bytes(capfd):
    assert by_name(rows_of(Net, []))["first"] == {
        "forward_us": 0,
        "backward_us": 0,
        "activation_bytes": 0,
        "output_bytes": 0,
        "id": 2,
        "parent": 0,
        "name": "first",
        "parameter_bytes": 288,
        "parameter_ids": [2, 3],
        "callable": True,
    }
    assert "by the bytes of its parameters" in capfd.readouterr().err


class Counts(Net):
    def forward(self, x):
        with torch.no_grad():
            self.first.weight.add_(1)
        assert x.sum() >= 0
        return super().forward(x)


def test_a_model_that_cannot_be_run_for_a_trace_is_planned_by_its_bytes_whatever_the_input(capfd):
    assert by_name(rows_of(Counts, [LINEAR]))["first"]["forward_us"] == 0
    assert "it writes to a parameter" in capfd.readouterr().err


class Blocks(nn.Module):
    def __init__(self, width=6, plan=("colwise", "rowwise")):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, width) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(width, 8) for _ in range(2))
        up, down = plan
        lamina.set_tensor_parallelism(self, plan={"ups.*": up, "downs.*": down})

    def forward(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = down(up(x).relu())
        return x


def test_layers_are_cut_as_on_the_first_rank_of_a_job():
    found = plan_of(Blocks, [LINEAR], rank=FirstRank(2, one_batch=True))
    assert found["slices"] == {
        "ranks": 2,
        "layers": [["ups.0", "colwise"], ["ups.1", "colwise"], ["downs.0", "rowwise"], ["downs.1", "rowwise"]],
    }
    rows, whole = by_name(found["nodes"]), by_name(rows_of(Blocks, [LINEAR]))
    assert rows["ups.1"]["parameter_bytes"] * 2 == whole["ups.1"]["parameter_bytes"] == 6 * 9 * 4
    assert rows["downs.1"]["parameter_bytes"] == (8 * 3 + 8) * 4
    assert rows["downs.1"]["forward_us"] > whole["downs.1"]["forward_us"] + 60  # a message
    assert found.keys() == {"nodes", "slices"} and plan_of(Blocks, [LINEAR]).keys() == {"nodes"}


def test_a_region_counts_for_each_batch():
    one, two = (by_name(rows_of(Blocks, [LINEAR], rank=FirstRank(2, one_batch=own))) for own in (True, False))
    assert two["downs.0"]["forward_us"] == 2 * one["downs.0"]["forward_us"]


def test_a_plan_of_slices_is_refused_as_in_a_job():
    with pytest.raises(UsageError, match=r"ups\.0 has 3 features in units of 1, and with tensor_parallel_degree: 4"):
        plan_of(lambda: Blocks(3), [LINEAR], rank=FirstRank(4))
    with pytest.raises(UsageError, match=r'has the style "colwis" for "ups\.\*", the nearest is "colwise"'):
        plan_of(lambda: Blocks(plan=("colwis", "rowwise")), [LINEAR], rank=FirstRank(2))


def test_inputs_are_expressions_with_or_without_a_name():
    args, kwargs = arguments(["1 + 1", "a=[2]", " b = 3", "2 == 3", "dict(x=1)"])
    assert args == (2, False, {"x": 1}) and kwargs == {"a": [2], "b": 3}
    with pytest.raises(UsageError, match=r"--input 'a=\(': SyntaxError"):
        arguments(["a=("])


@pytest.mark.parametrize(
    "name, text",
    [("torch", "MODULE:CALLABLE"), ("no.such:x", "no"), ("torch.nn:Nothing", "Nothing"), ("torch:pi", "no callable")],
)
def test_models_that_cannot_be_found(name, text):
    with pytest.raises(UsageError, match=text):
        find(name)
    assert find("torch.nn:Linear.extra_repr") is nn.Linear.extra_repr


def test_what_is_no_model():
    with pytest.raises(UsageError, match="no module, but int"):
        rows_of(lambda: 5, [])


SCRIPT = """
from torch import nn
print("what a script says is no plan")
def build():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
def broken():
    raise ValueError("no such width")
class Sized(nn.Module):
    def __init__(self, width):
        super().__init__()
def sliced():
    import lamina
    model = build()
    lamina.set_tensor_parallelism(model, plan={"*": "colwise_gather_output"})
    return model
model = build()
"""


@pytest.fixture
def planned(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SCRIPT)
    monkeypatch.setenv("LAMINA_PYTHON", sys.executable)

    def run(*words, model="mine:build"):
        line = [command(), "plan", "--model", model, *words]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)

    return run


def test_the_command(planned):
    run = planned("--input", LINEAR, "-n", "2", "-m", "16", "--link-bytes-per-us", "1e4", "--json")
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert set(plan["partition"].values()) == {0, 1} and plan["predicted_step_us"] > 0
    run = planned("--input", "nonsense", "-n", "2")
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == "lamina plan: --input 'nonsense': NameError: name 'nonsense' is not defined"
    run = planned("--input", LINEAR)
    assert (run.returncode, run.stderr) == (2, "lamina plan: --model requires --partitions; see `lamina plan --help`\n")


def test_the_command_says_which_layers_are_cut_how(planned):
    words = ("--input", LINEAR, "-n", "2", "--tensor-parallel-degree", "2", "--prescaled-batch")
    run = planned(*words, model="mine:sliced")
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith(
        "have slices of layers; times have their exchanges in them\n  colwise_gather_output: * (4)\n"
    )
    layers = json.loads(planned(*words, "--json", model="mine:sliced").stdout)["slices"]["layers"]
    assert layers == [[str(number), "colwise_gather_output"] for number in range(4)]
    run = planned("--input", LINEAR, "-n", "2", "--tensor-parallel-degree", "9", model="mine:sliced")
    assert run.returncode == 2
    assert "lamina plan: 0 has 8 features in units of 1, and with tensor_parallel_degree: 9 some rank" in run.stderr


NO_MODELS = [
    ("mine:model", "--model 'mine:model': it is a model already; give a function or a class that returns one"),
    ("mine:__name__", "--model 'mine:__name__': it is no callable, but str"),
    ("mine:nothing", "--model 'mine:nothing': module 'mine' has no attribute 'nothing'"),
    ("other:build", "--model 'other:build': No module named 'other'"),
    ("mine", "--model 'mine': expected MODULE:CALLABLE, such as package.models:build"),
]
UNCALLED = "the model cannot be called with what --input gives"
RAISING = [
    ("mine:broken", LINEAR, "ValueError: no such width", "--model: ValueError: no such width"),
    ("mine:Sized", LINEAR, "TypeError: Sized.__init__() missing", "--model: TypeError: Sized.__init__() missing"),
    ("mine:build", "torch.zeros(2, 3)", "RuntimeError: mat1", UNCALLED),
    ("mine:build", "x=3", "TypeError: Sequential.forward()", UNCALLED),
]


@pytest.mark.parametrize("model, says", some(NO_MODELS, 1))
def test_what_is_no_model_is_one_line_and_exit_code_2(planned, model, says):
    run = planned("--input", LINEAR, "-n", "2", model=model)
    assert (run.returncode, run.stdout) == (2, "")
    assert [line for line in run.stderr.splitlines() if "script says" not in line] == [f"lamina plan: {says}"]


@pytest.mark.parametrize("model, input, raised, says", some(RAISING, 1))
def test_what_the_users_code_raises_is_shown_from_there_on(planned, model, input, raised, says):
    run = planned("--input", input, "-n", "2", model=model)
    assert (run.returncode, run.stdout) == (2, "")
    lines = run.stderr.splitlines()
    assert lines[-1].startswith(f"lamina plan: {says}")
    assert any(line.startswith(raised) for line in lines) and "lamina/planning/cli.py" not in run.stderr
