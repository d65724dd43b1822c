// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/config.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/base/world.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using base::Config;

std::pair<Config, std::vector<std::string>> parse(const std::string& json) {
  const auto environment = base::process_environment();
  const auto world = base::read_world(environment);
  auto parsed = base::parse_config({json, environment("SM_HP_MP_PARAMETERS"), world.size > 1});
  return {std::move(parsed.config), std::move(parsed.warnings)};
}

}  // namespace

void bind_config(py::module_& module) {
  py::class_<Config>(module, "Config")
      .def("to_json", [](const Config& config) { return base::to_json(config); })
      .def("differences", [](const Config& a, const Config& b) { return base::differences(a, b); })
      .def("__getattr__", [](const Config& config, const std::string& key) {
        const py::dict keys = py::module_::import("json").attr("loads")(base::to_json(config));
        if (!keys.contains(key.c_str())) throw py::attribute_error("the configuration has no key " + key);
        return py::object(keys[key.c_str()]);
      });
  module.def("parse_config", &parse, py::arg("config_json"));
  py::class_<base::World>(module, "World")
      .def_property_readonly("rank", [](const base::World& world) { return world.rank.value; })
      .def_readonly("size", &base::World::size)
      .def_readonly("local_rank", &base::World::local_rank)
      .def_readonly("local_size", &base::World::local_size)
      .def_readonly("node_rank", &base::World::node_rank)
      .def_readonly("master_addr", &base::World::master_addr)
      .def_readonly("master_port", &base::World::master_port)
      .def_readonly("launched", &base::World::launched);
  module.def("read_world", [] { return base::read_world(base::process_environment()); });
}

}  // namespace lamina::python
