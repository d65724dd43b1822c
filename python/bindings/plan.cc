// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/plan.h"

#include <pybind11/stl.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::python {
namespace {

// Takes the value of a key out of a row, where there is one.
template <class T>
void take(const py::dict& row, const char* key, T& into) {
  if (!row.contains(key)) return;
  into = row[key].cast<T>();
  row.attr("pop")(key);
}

}  // namespace

plan::Node to_node(const py::dict& row) {
  py::dict rest = row.attr("copy")();
  int id = 0;
  std::optional<int> placed_at;
  plan::Node node;
  take(rest, "id", id);
  take(rest, "parent", node.parent);
  take(rest, "name", node.name);
  take(rest, "forward_us", node.forward_us);
  take(rest, "backward_us", node.backward_us);
  take(rest, "parameter_bytes", node.parameter_bytes);
  take(rest, "activation_bytes", node.activation_bytes);
  take(rest, "output_bytes", node.output_bytes);
  take(rest, "parameter_ids", node.parameter_ids);
  take(rest, "callable", node.callable);
  take(rest, "placed_at", placed_at);
  take(rest, "together", node.together);
  take(rest, "anywhere", node.anywhere);
  std::vector<std::tuple<int, double, double, std::int64_t, bool>> stretches;
  take(rest, "stretches", stretches);
  for (const auto& [at, forward_us, backward_us, value_bytes, works] : stretches) {
    node.stretches.push_back({at, forward_us, backward_us, value_bytes, works});
  }
  if (placed_at) node.placed_at = base::Partition(*placed_at);
  if (py::len(rest) > 0)
    throw base::InternalError(base::str("a module of a plan has no keys ", py::str(rest).cast<std::string>()));
  return node;
}

py::dict to_dict(const plan::ModuleTree& tree, const plan::Report& report) {
  py::dict partition;
  for (std::size_t node = 0; node < tree.size(); ++node)
    partition[py::str(tree[node].name)] = report.owners[node].value;
  py::list stages;
  const bool timed = report.predicted_step_us > 0;
  for (std::size_t i = 0; i < report.stages.size(); ++i) {
    const plan::Stage& stage = report.stages[i];
    py::dict row;
    row["partition"] = i;
    row["time_us"] = timed ? py::object(py::float_(stage.time_us)) : py::none();
    row["parameter_bytes"] = stage.parameter_bytes;
    row["memory_bytes"] = stage.memory_bytes;
    row["out_bytes"] = stage.out_bytes;
    stages.append(row);
  }
  py::dict result;
  result["partition"] = partition;
  result["stages"] = stages;
  result["predicted_step_us"] = timed ? py::object(py::float_(report.predicted_step_us)) : py::none();
  result["bubble"] = report.bubble;
  result["warning"] = report.warning;
  return result;
}

}  // namespace lamina::python
