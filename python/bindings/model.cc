// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/model.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "lamina/model/agreement.h"
#include "lamina/model/norm.h"
#include "lamina/model/values.h"
#include "lamina/plan/call_order.h"
#include "lamina/plan/plan_from_config.h"
#include "lamina/value/released.h"
#include "python/bindings/convert.h"
#include "python/bindings/plan.h"

namespace lamina::python {
namespace {

using model::ParameterTable;
using session::Session;
using topology::Group;
using Release = py::gil_scoped_release;

py::tuple plan_model(Session& session, const std::vector<py::dict>& rows) {
  plan::ModuleTree tree;
  for (const py::dict& row : rows) tree.push_back(to_node(row));
  const plan::Report report = plan::plan_for(session.config(), tree);
  std::vector<std::int64_t> owners;
  for (auto owner : report.owners) owners.push_back(owner.value);
  return py::make_tuple(owners, plan::printed(tree, report, session.config()), to_dict(tree, report));
}

py::list agree(Session& session, const std::string& description, const std::string& error, const py::object& word) {
  const model::Statement statement{description, error, to_value(word)};
  std::vector<value::Value> words;
  {
    const Release release;
    words = model::agree(statement, session.members(Group::kWorld), session.job().mailbox(), session.patience());
  }
  py::list objects;
  for (const auto& each : words) objects.append(to_object(each));
  return objects;
}

// (name, tensor, is a buffer, partition)
using Row = std::tuple<std::string, at::Tensor, bool, int>;

ParameterTable make_table(Session& session, const std::vector<Row>& rows) {
  const auto& topology = session.topology();
  std::vector<model::Parameter> all;
  for (const auto& [name, tensor, buffer, partition] : rows) {
    all.push_back(model::whole_in(base::Partition(partition), name, tensor, buffer, topology.size(Group::kDp)));
  }
  return {std::move(all), session.partition(), topology.size(Group::kPp)};
}

// The text of an error of using a tensor on this rank whose value is in `partition`.
std::string why_released(const Session& session, const std::string& name, base::Partition partition) {
  return base::str(name, " lives in partition ", partition, " on rank ", session.owner(partition),
                   "; it was used on rank ", session.world().rank,
                   ": use it only inside the forward of its own module, or place its user in the same partition with "
                   "set_partition. What concerns all parameters, such as an average or a penalty, is done between "
                   "steps: model.local_named_parameters() has those that are here, model.state_dict() all values on "
                   "every rank");
}

auto why_released(const Session& session) {
  return
      [&session](const model::Parameter& row) { return why_released(session, row.layout.name, row.layout.partition); };
}

std::int64_t give_values(Session& session, const ParameterTable& table, const py::object& make,
                         std::size_t portion_bytes) {
  const auto made = [&make](std::span<const model::Parameter> rows) {
    const py::gil_scoped_acquire gil;
    py::list tensors;
    for (const auto& row : rows) tensors.append(py::cast(row.tensor));
    make(tensors);
  };
  const Release release;
  return model::give_values(table, session.members(Group::kWorld), session.job().mailbox(), session.patience(),
                            {made, why_released(session)}, portion_bytes);
}

void release_tensor(Session& session, at::Tensor tensor, const std::string& name, int partition,
                    const std::optional<at::Tensor>& like) {
  value::release(tensor, why_released(session, name, base::Partition(partition)), like.value_or(at::Tensor()));
}

std::vector<at::Tensor> norms(Session& session, const ParameterTable& table,
                              const std::vector<std::pair<at::Tensor, std::optional<at::Tensor>>>& given,
                              double norm_type) {
  std::vector<model::Measured> measured;
  for (const auto& [of, tensor] : given) measured.emplace_back(of, tensor.value_or(at::Tensor()));
  const Release release;
  return model::norms(table, measured, norm_type, session.members(Group::kPp), session.job().mailbox(),
                      session.patience());
}

}  // namespace

constexpr std::pair<std::string_view, Group> kGroups[] = {
    {"world", Group::kWorld}, {"mp", Group::kMp},   {"dp", Group::kDp},       {"pp", Group::kPp},
    {"tp", Group::kTp},       {"rdp", Group::kRdp}, {"shard", Group::kShard}, {"node", Group::kNode}};

Group group_of(const std::string& kind) {
  for (const auto& [name, group] : kGroups) {
    if (name == kind) return group;
  }
  throw base::UsageError(base::str("\"", kind, "\" is no kind of group"));
}

std::string kind_of(Group group) {
  return std::string(std::ranges::find(kGroups, group, [](const auto& each) { return each.second; })->first);
}

void bind_model(py::module_& module, py::class_<Session, std::shared_ptr<Session>>& kind) {
  module.def("call_order", &plan::call_order, py::arg("parents"), py::arg("called"));
  py::class_<ParameterTable>(module, "ParameterTable")
      .def(py::init(&make_table), py::arg("session"), py::arg("rows"))
      .def("whole_here", py::overload_cast<const at::Tensor&>(&ParameterTable::whole_here, py::const_),
           py::arg("tensor"))
      .def(
          "has_any",
          [](const ParameterTable& table, const std::vector<at::Tensor>& tensors) {
            return std::ranges::any_of(table.find_with_gradients(tensors),
                                       [](const auto* row) { return row != nullptr; });
          },
          py::arg("tensors"))
      .def_property_readonly("whole_everywhere", &ParameterTable::whole_everywhere);
  kind.def("plan", &plan_model)
      .def("agree", &agree, py::arg("description"), py::arg("error"), py::arg("word"))
      .def("give_values", &give_values, py::arg("table"), py::arg("make"),
           py::arg("portion_bytes") = model::kPortionBytes)
      .def(
          "release_others",
          [](Session& session, const ParameterTable& table) { model::release_others(table, why_released(session)); },
          py::arg("table"))
      .def("release", &release_tensor, py::arg("tensor"), py::arg("name"), py::arg("partition"),
           py::arg("like") = py::none())
      .def("norms", &norms, py::arg("table"), py::arg("given"), py::arg("norm_type"));
}

}  // namespace lamina::python
