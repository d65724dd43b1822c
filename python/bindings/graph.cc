// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "lamina/base/str.h"
#include "lamina/graph/current.h"
#include "lamina/graph/placement.h"
#include "lamina/graph/program.h"
#include "lamina/graph/segments.h"
#include "lamina/session/session.h"
#include "python/bindings/bindings.h"
#include "python/bindings/plan.h"

namespace lamina::python {
namespace {

using graph::Among;
using graph::GraphCut;
using Sources = std::vector<std::pair<int, int>>;  // operation, output

std::vector<graph::OperationOutput> sources(const Sources& pairs) {
  std::vector<graph::OperationOutput> made;
  for (const auto& [operation, output] : pairs) made.push_back({operation, output});
  return made;
}

GraphCut cut(const std::vector<int>& partitions, const std::vector<Sources>& inputs,
             const std::vector<std::vector<int>>& after, const std::vector<std::vector<bool>>& gradients,
             const Sources& results, int count) {
  std::vector<graph::Placed> operations;
  for (std::size_t i = 0; i < partitions.size(); ++i) {
    operations.push_back({base::Partition(partitions[i]), sources(inputs[i]), after[i], gradients[i]});
  }
  return graph::cut(operations, sources(results), count);
}

using Operations = std::vector<graph::TracedOperation>;
using Variables = std::vector<std::pair<std::string, std::int64_t>>;  // name, bytes

graph::TracedGraph traced(const Operations& operations, const Variables& variables, const Sources& results) {
  graph::TracedGraph graph{operations, {}, sources(results)};
  for (const auto& [name, size_bytes] : variables) graph.variables.push_back({name, size_bytes});
  return graph;
}

std::pair<std::vector<int>, std::string> place(const config::Config& config, const Operations& operations,
                                               const Variables& variables, const Sources& results) {
  const auto made = graph::place(traced(operations, variables, results), config);
  std::vector<int> partitions;
  for (const auto partition : made.partitions) partitions.push_back(static_cast<int>(partition.value));
  return {partitions, made.text};
}

std::int64_t add_graph(session::Session& session, const GraphCut& cut, const Sources& results,
                       const std::vector<std::string>& names, const std::string& title, bool among_copies) {
  const auto group = among_copies ? topology::kSameParts : topology::kPartitions;
  const base::Partition own(session.topology().index(group, session.world().rank));
  auto program = graph::program_of(cut, sources(results), own, session.members(group), names, title);
  return graph::current(among_copies ? Among::kCopies : Among::kOneCopy)->add(std::move(program));
}

void interrupt(const std::string& why) {
  for (const auto among : {Among::kOneCopy, Among::kCopies}) graph::current(among)->interrupt(why);
}

void abandon(const session::Session& session, const std::string& why) {
  for (const auto among : {Among::kOneCopy, Among::kCopies}) {
    graph::current(among)->abandon(base::str("rank ", session.world().rank, ": ", why));
  }
}

}  // namespace

void bind_graph(py::module_& module) {
  py::class_<graph::TracedOperation>(module, "GraphOperation", "An operation of a graph, to be placed.")
      .def(
          py::init([](std::string name, const Sources& inputs, std::vector<int> variables, std::string layer,
                      std::vector<int> together, std::optional<int> placed_at, std::vector<std::int64_t> output_bytes) {
            return graph::TracedOperation{std::move(name),        sources(inputs),     std::move(variables),
                                          std::move(layer),       std::move(together), placed_at,
                                          std::move(output_bytes)};
          }),
          py::kw_only(), py::arg("name"), py::arg("inputs"), py::arg("variables"), py::arg("layer"),
          py::arg("together"), py::arg("placed_at"), py::arg("output_bytes"));
  py::class_<GraphCut>(module, "GraphCut", "A graph in segments: see lamina/graph/segments.h.")
      .def_property_readonly(
          "segments",
          [](const GraphCut& cut) {
            std::vector<std::tuple<int, int, std::vector<int>>> rows;
            for (const auto& [partition, level, operations] : cut.segments) {
              rows.emplace_back(static_cast<int>(partition.value), level, operations);
            }
            return rows;
          },
          "Partition, level and operations of each; those without operations are the outside.")
      .def_property_readonly(
          "crossings",
          [](const GraphCut& cut) {
            std::vector<std::tuple<int, int, int, int, bool>> rows;
            for (const auto& [value, maker, reader, gradient] : cut.crossings) {
              rows.emplace_back(value.operation, value.output, maker, reader, gradient);
            }
            return rows;
          },
          "Operation, output, the segments that make and read it, and whether its gradient comes back.");
  module.def("place_operations", &place, py::arg("config"), py::arg("operations"), py::arg("variables"),
             py::arg("results"),
             "The partition of each operation, and the plan as text. Variables have names and bytes, results are "
             "outputs of operations. Raises ConfigError for placements by hand that are impossible, and for an "
             "operation that reads what is not there.");
  module.def(
      "graph_rows",
      [](const Operations& operations, const Variables& variables, const Sources& results) {
        return tree_rows(graph::items(traced(operations, variables, results)));
      },
      py::arg("operations"), py::arg("variables"), py::arg("results"),
      "The rows of a plan of operations, one for each item: see [Note: items of a graph] in lamina/graph/placement.h.");
  module.def("cut_graph", &cut, py::arg("partitions"), py::arg("inputs"), py::arg("after"), py::arg("gradients"),
             py::arg("results"), py::arg("count"),
             "A graph whose operations have partitions. `inputs` are outputs of operations, `after` operations, "
             "`gradients` say of each output whether it has one.");
  module.def("interrupt_graphs", &interrupt, py::arg("why"), py::call_guard<py::gil_scoped_release>(),
             "Ends the steps of graphs that are open, on all ranks.");
  module.def("abandon_graph_step", &abandon, py::arg("session"), py::arg("why"),
             py::call_guard<py::gil_scoped_release>(),
             "Says that this rank does not enter the next step of a graph, to those who do.");
  module.def(
      "add_graph", &add_graph, py::arg("session"), py::arg("cut"), py::arg("results"), py::arg("names"),
      py::arg("title"), py::arg("among_copies") = false,
      "Has this rank take part in the graph; its number, alike on all ranks. Its partitions are those of one copy "
      "of the model, or the copies of this rank's.");
}

}  // namespace lamina::python
