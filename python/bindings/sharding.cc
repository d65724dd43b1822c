// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/sharding.h"
#include "lamina/sharding/units.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using sharding::Sharding;

// The second one of each may be None in Python.
using Pairs = std::vector<std::pair<at::Tensor, std::optional<at::Tensor>>>;

// A module's path, whether it is called, its word, that of its root's function, and the parameters in it.
using Asked = std::tuple<std::string, bool, std::optional<bool>, bool, std::vector<int>>;

std::vector<std::tuple<std::string, std::string, std::vector<int>>> units_by_rules(
    const std::vector<Asked>& given, const std::vector<std::int64_t>& sizes, double least) {
  std::vector<sharding::AskedModule> modules;
  for (const auto& [name, called, word, by_function, parameters] : given) {
    modules.push_back({name, called, word, by_function, parameters});
  }
  std::vector<std::tuple<std::string, std::string, std::vector<int>>> units;
  for (auto& [name, rule, parameters] : sharding::units_by_rules(modules, sizes, least)) {
    units.emplace_back(name, sharding::name_of(rule), parameters);
  }
  return units;
}

std::vector<model::Measured> measured(Sharding& sharding, const Pairs& given, double norm_type) {
  std::vector<model::Measured> pairs;
  for (const auto& [parameter, gradient] : given) pairs.emplace_back(parameter, gradient.value_or(at::Tensor()));
  const Release release;
  return sharding.measured(std::move(pairs), norm_type);
}

}  // namespace

void bind_sharding(py::module_& module) {
  const py::call_guard<Release> release;
  module.def("units_by_rules", &units_by_rules, py::arg("modules"), py::arg("sizes"), py::arg("least"),
             "Units as (name, rule, numbers of parameters), of modules as (name, whether it is called, its word, its "
             "root's function's, numbers of all parameters in it); see lamina/sharding/units.h.");
  py::class_<Sharding, data_parallel::ShardedGradients, std::shared_ptr<Sharding>>(
      module, "Sharding",
      "Sharded data parallelism on this rank; see lamina/sharding/sharding.h. Parameters go by their numbers.")
      .def_property_readonly("parameters",
                             [](const Sharding& sharding) {
                               std::vector<std::pair<std::string, at::Tensor>> all;
                               for (std::size_t i = 0; i < sharding.size(); ++i) {
                                 all.emplace_back(sharding.named(i).name, sharding.named(i).parameter);
                               }
                               return all;
                             })
      .def("shard", &Sharding::shard, py::arg("number"))
      .def("find", &Sharding::find, py::arg("parameter"),
           "The number of a parameter, or of the one whose memory a tensor has.")
      .def("find_shard", &Sharding::find_shard, py::arg("shard"), "The number of the parameter whose shard it is.")
      .def(
          "parameter", [](const Sharding& sharding, std::size_t number) { return sharding.named(number).parameter; },
          py::arg("number"))
      .def(
          "hold", [](Sharding& sharding, std::size_t number) { sharding.values()->hold(number); }, py::arg("number"),
          py::call_guard<Release>(), "Has the whole value here, until as many `let_go`.")
      .def(
          "let_go", [](Sharding& sharding, std::size_t number) { sharding.values()->let_go(number); },
          py::arg("number"), py::call_guard<Release>())
      .def(
          "lend", [](Sharding& sharding, std::size_t number) { sharding.values()->lend(number); }, py::arg("number"),
          py::call_guard<Release>(), "Gives a copy of the value that may be written to, until `take_back`.")
      .def(
          "take_back", [](Sharding& sharding, std::size_t number) { sharding.values()->take_back(number); },
          py::arg("number"), py::call_guard<Release>())
      .def("zero_grad", &Sharding::zero_grad, py::arg("number"), py::arg("set_to_none"),
           "Forgets the shard's gradient, or makes it zero, and what was summed for its next one.")
      .def("write_back", &Sharding::write_back, py::arg("number"), py::arg("value"),
           "Gives this rank's shard its part of a whole value.")
      .def_property_readonly(
          "live", [](const Sharding& sharding) { return sharding.values()->live(); },
          "Elements of values that are here.")
      .def_property_readonly("most_live", [](const Sharding& sharding) { return sharding.values()->most_live(); })
      .def("before_update", &Sharding::before_update, release,
           "Before shards change; collective over the sharding group, like `after_update`.")
      .def("after_update", &Sharding::after_update, release)
      .def("measured", &measured, py::arg("pairs"), py::arg("norm_type"),
           "Parameters and gradients with the norm of all of a gradient, as a tensor, in the place of a shard's; "
           "collective over the sharding group.")
      .def(
          "gather", &Sharding::gather, py::arg("number"), py::arg("part"), release,
          "The whole of which each rank has such a part, in the parameter's shape; collective over the sharding group.")
      .def("part_of", &Sharding::part_of, py::arg("number"), py::arg("whole"), release,
           "This rank's part of a whole, padded with zeros.");
}

}  // namespace lamina::python
