# SPDX-License-Identifier: Apache-2.0
"""`lamina plan FILE.json`: what it prints, and how it refuses."""

import json
import subprocess

import pytest
from launch.launcher_harness import command

COSTS = {"forward_us": 10, "backward_us": 20, "parameter_bytes": 100, "activation_bytes": 5, "output_bytes": 7}
IDLE = dict.fromkeys(COSTS, 0)


def plan_file(**changes):
    nodes = [{"id": 0, "parent": None, "name": "", **IDLE}]
    nodes += [{"id": i, "parent": 0, "name": f"h.{i}", **COSTS} for i in range(1, 5)]
    return {
        "partitions": 2, "microbatches": 4, "schedule": "interleaved", "memory_weight": 0.2, "nodes": nodes, **changes
    }  # fmt: skip


@pytest.fixture
def plan(tmp_path):
    def run(content, *options):
        path = tmp_path / "tree.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        words = [command(), "plan", path, *options]
        return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)

    return run


def test_the_table_says_who_owns_what_and_what_it_costs(plan):
    result = plan(plan_file())
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "Partition assignments: {0: [model (itself), h.1, h.4], 1: [h.2-3]}"
    assert lines[1].split() == ["partition", "modules", "parameters", "share", "time", "memory", "sends", "owns"]
    assert lines[-1] == "predicted step 270.0 us, bubble 11.1 %"


@pytest.mark.parametrize("options, of_second, of_last, step", [([], 1, 0, 270), (["--baseline"], 0, 1, 300)])
def test_json_has_the_plan_and_its_cost(plan, options, of_second, of_last, step):
    result = json.loads(plan(plan_file(), "--json", *options).stdout)
    assert result["partition"] == {"0": 0, "1": 0, "2": of_second, "3": 1, "4": of_last}
    assert [stage["time_us"] for stage in result["stages"]] == [60, 60]
    assert [stage["bytes"] for stage in result["stages"]] == [200, 200]
    assert result["predicted_step_us"] == step and result["bubble"] == pytest.approx(1 - 240 / step)


def test_equal_files_give_equal_output(plan):
    assert plan(plan_file(partitions=3), "--json").stdout == plan(plan_file(partitions=3), "--json").stdout


def test_shared_modules_stay_together(plan):
    partition = json.loads(plan(plan_file(shared=[[1, 4]]), "--json").stdout)["partition"]
    assert partition["1"] == partition["4"]


def graph_file():
    """Four operations in a row, of which all read the first one's value. The second one's is large."""
    nodes = [{"id": 0, "parent": None, "name": "model", **IDLE, "stretches": [[0, 0, 0, 0, False]]}]
    for at, reads in enumerate([[], [[1, 10]], [[1, 10], [2, 100]], [[1, 10], [3, 10]]], start=1):
        stretch = [at, 10, 20, 100 if at == 2 else 10, True, None, reads]
        nodes.append({"id": at, "parent": 0, "name": f"op_{at}", **COSTS, "stretches": [stretch]})
    return plan_file(graph=True, nodes=nodes)


def test_a_graph_is_cut_where_few_bytes_go_and_a_value_is_sent_once_to_a_rank(plan):
    result = json.loads(plan(graph_file(), "--json").stdout)
    assert result["partition"] == {"0": 0, "1": 0, "2": 1, "3": 1, "4": 0}
    assert [stage["out_bytes"] for stage in result["stages"]] == [10, 10]
    baseline = json.loads(plan(graph_file(), "--json", "--baseline").stdout)
    assert [stage["out_bytes"] for stage in baseline["stages"]] == [110, 0]


@pytest.mark.parametrize(
    "content, text",
    [
        ("{", "not valid JSON"),
        (plan_file(partitions=0), "partitions: 0 is not allowed"),
        (plan_file(nodes=[{"id": 3, "parent": 4, "name": "a", **COSTS}]), 'node 3 ("a"): parent: 4 is the id of no'),
        (plan_file(nodes=[{"id": 3, "parent": None, "name": "a"}]), 'node 3 ("a"): forward_us: is missing'),
        (plan_file(memory_limit_bytes=1), "bytes per rank"),
    ],
    ids=["json", "field", "node", "missing", "memory"],
)
def test_wrong_input_is_one_line_and_exit_code_2(plan, content, text):
    result = plan(content)
    assert result.returncode == 2 and result.stdout == ""
    assert text in result.stderr and result.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_named(tmp_path):
    words = [str(command()), "plan", str(tmp_path / "none.json")]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and "none.json: cannot be read" in result.stderr


def test_many_more_partitions_than_modules_and_very_many_microbatches_take_no_long_time(plan):
    result = plan(plan_file(partitions=65536, microbatches=10**9))
    assert result.returncode == 0 and result.stdout.count("(nothing)") == 65536 - 4
