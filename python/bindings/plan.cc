// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/plan.h"

#include <pybind11/stl.h>

#include <map>

#include "lamina/base/error.h"
#include "lamina/base/own_clock.h"
#include "lamina/base/str.h"

namespace lamina::python {
namespace {

using model::ModuleTree;
// name, tensor, is a buffer, has a shape, shape of the whole of which it is a slice
using TensorRows = std::vector<std::tuple<std::string, at::Tensor, bool, bool, std::vector<std::int64_t>>>;

model::Role role_of(const std::string& role) {
  if (role == "called") return model::Role::kCalled;
  return role == "part" ? model::Role::kPart : model::Role::kContainer;
}

void add(ModuleTree& tree, const std::string& path, std::uintptr_t id, const std::string& type, const std::string& role,
         const TensorRows& tensors, bool indivisible, bool same_everywhere, bool draws, bool dynamic,
         bool keeps_statistics, std::optional<int> placed_at) {
  model::Module module{
      path, id, type, role_of(role), indivisible, same_everywhere, draws, dynamic, keeps_statistics, placed_at};
  for (const auto& [name, tensor, buffer, has_shape, whole] : tensors) {
    module.tensors.push_back({name, tensor, buffer, has_shape, whole});
  }
  tree.add(module);
}

template <class T, class Member>
std::vector<T> of_nodes(const ModuleTree& tree, Member member) {
  std::vector<T> values;
  for (const auto& node : tree.nodes()) values.push_back(node.*member);
  return values;
}

py::set ids(const ModuleTree& tree, const std::vector<bool>& wanted) {
  py::set ids;
  for (int node = 0; node < tree.size(); ++node) {
    if (wanted[node]) ids.add(py::int_(tree.nodes()[node].id));
  }
  return ids;
}

template <class T>
void take(const py::handle& from, const char* name, T& into) {
  into = from.attr(name).cast<T>();
}

model::Cost to_cost(const py::handle& measures) {
  model::Cost cost;
  take(measures, "order", cost.order);
  take(measures, "calls", cost.calls);
  take(measures, "forward_us", cost.forward_us);
  take(measures, "backward_us", cost.backward_us);
  take(measures, "activation_bytes", cost.activation_bytes);
  take(measures, "output_bytes", cost.output_bytes);
  take(measures, "reads", cost.reads);
  take(measures, "ties", cost.ties);
  for (const auto& each : measures.attr("stretches")) {
    auto& stretch = cost.stretches.emplace_back();
    take(each, "at", stretch.at);
    take(each, "forward_us", stretch.forward_us);
    take(each, "backward_us", stretch.backward_us);
    take(each, "value_bytes", stretch.value_bytes);
    take(each, "works", stretch.works);
    take(each, "weights_us", stretch.weights_us);
    auto& reads = stretch.reads.emplace();
    for (const auto& [at, bytes] : each.attr("reads").cast<std::map<int, std::int64_t>>()) reads.push_back({at, bytes});
  }
  return cost;
}

// A stretch as in a plan's file.
py::tuple to_row(const plan::Stretch& stretch) {
  auto row = py::make_tuple(stretch.at, stretch.forward_us, stretch.backward_us, stretch.value_bytes, stretch.works);
  if (!stretch.reads) return row;
  py::list reads;
  for (const auto& [at, bytes] : *stretch.reads) reads.append(py::make_tuple(at, bytes));
  return row + py::make_tuple(stretch.weights_us, reads);
}

py::dict to_dict(const plan::Node& node, int id) {
  py::dict row;
  row["id"] = id;
  row["parent"] = node.parent;
  row["name"] = node.name;
  row["parameter_bytes"] = node.parameter_bytes;
  row["parameter_ids"] = node.parameter_ids;
  row["callable"] = node.callable;
  row["placed_at"] = node.placed_at ? py::object(py::int_(node.placed_at->value)) : py::none();
  if (node.anywhere) row["anywhere"] = true;
  row["forward_us"] = node.forward_us;
  row["backward_us"] = node.backward_us;
  row["activation_bytes"] = node.activation_bytes;
  row["output_bytes"] = node.output_bytes;
  py::list stretches;
  for (const auto& each : node.stretches) stretches.append(to_row(each));
  row["stretches"] = stretches;
  row["together"] = node.together;
  return row;
}

py::tuple rows(const ModuleTree& tree, const py::object& measures) {
  const auto [rows, nodes] = model::plan_rows(tree, to_costs(measures));
  return py::make_tuple(tree_rows(rows), nodes);
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

}  // namespace

py::list tree_rows(const plan::ModuleTree& tree) {
  py::list rows;
  for (std::size_t row = 0; row < tree.size(); ++row) rows.append(to_dict(tree[row], static_cast<int>(row)));
  return rows;
}

model::Costs to_costs(const py::object& measures) {
  if (measures.is_none()) return std::nullopt;
  std::vector<model::Cost> costs;
  for (const auto& each : measures) costs.push_back(to_cost(each));
  return costs;
}

void bind_plan(py::module_& module) {
  py::class_<base::OwnClock>(module, "OwnClock",
                             "Stands while the thread that made it is ready and others have its processor: see "
                             "lamina/base/own_clock.h.")
      .def(py::init<>())
      .def("now_us",
           [](base::OwnClock& clock) { return std::chrono::duration<double, std::micro>(clock.now()).count(); });
  py::class_<ModuleTree>(
      module, "ModuleTree",
      "The modules that can be owned: see [Note: module tree] in lamina/model/module_tree.h.\n\nAttributes: names, "
      "parents, ids: per node; the root is node 0, with the parent -1. homes: by id of each module, the node that it "
      "is, or is part of. starting_stream, waited_for: ids of the nodes whose calls run in a random stream of their "
      "own, and are waited for.")
      .def(py::init<>())
      .def("add", &add, py::arg("path"), py::arg("id"), py::arg("type"), py::arg("role"), py::arg("tensors"),
           py::kw_only(), py::arg("indivisible") = false, py::arg("same_everywhere") = false, py::arg("draws") = false,
           py::arg("dynamic") = false, py::arg("keeps_statistics") = false, py::arg("placed_at") = py::none(),
           "A module in one of its places, parents first. Its tensors: name, tensor, is it a buffer, has it a shape.")
      .def_property_readonly(
          "names", [](const ModuleTree& tree) { return of_nodes<std::string>(tree, &ModuleTree::Node::name); })
      .def_property_readonly("parents",
                             [](const ModuleTree& tree) { return of_nodes<int>(tree, &ModuleTree::Node::parent); })
      .def_property_readonly(
          "ids", [](const ModuleTree& tree) { return of_nodes<std::uintptr_t>(tree, &ModuleTree::Node::id); })
      .def_property_readonly("homes", &ModuleTree::homes)
      .def_property_readonly("starting_stream",
                             [](const ModuleTree& tree) { return ids(tree, tree.starts_rng_stream()); })
      .def_property_readonly("waited_for", [](const ModuleTree& tree) { return ids(tree, tree.waited_for()); })
      .def("paths", &ModuleTree::paths, "Gives the home of each module, under each of its names.")
      .def(
          "tensors",
          [](const ModuleTree& tree) {
            std::vector<std::tuple<std::string, at::Tensor, int>> tensors;
            for (const auto& held : tree.tensors()) tensors.emplace_back(held.name, held.tensor, held.node);
            return tensors;
          },
          "(name, tensor, node) of every parameter, then of every buffer, each once.")
      .def("description", &ModuleTree::description, "A line for each module and tensor: equal texts, equal models.")
      .def("rows", &rows, py::arg("measures") = py::none(),
           "The rows of a plan, children in the order of their first calls, and the node that each stands for. Keys: "
           "those of a node in a plan's file, with the position as \"id\", and \"placed_at\", a partition or None.");
  py::class_<model::Plan>(
      module, "Plan",
      "Says who is to own what.\n\nAttributes: report: {\"partition\": {name: partition}, \"stages\": [{\"partition\", "
      "\"time_us\", \"parameter_bytes\", \"memory_bytes\", \"out_bytes\"}], \"predicted_step_us\", \"bubble\", "
      "\"warning\"}; times are None where no node has any. See lamina/plan/report.h.")
      .def_property_readonly("report", [](const model::Plan& plan) { return to_dict(plan.rows, plan.report); });
}

}  // namespace lamina::python
