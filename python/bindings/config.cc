// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/config/graph_config.h"
#include "lamina/environment/world.h"
#include "lamina/rendezvous/master_address.h"
#include "lamina/verification/configuration.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using config::Config;

std::tuple<Config, std::vector<std::string>, std::vector<std::string>> parse(const std::string& json) {
  auto parsed = verification::read_configuration(json, environment::process_environment());
  return {std::move(parsed.config), std::move(parsed.warnings), std::move(parsed.given)};
}

}  // namespace

void bind_config(py::module_& module) {
  py::class_<Config>(module, "Config",
                     "The checked configuration: one read-only attribute per key, as in lamina/config/config.h.",
                     py::dynamic_attr())  // with the keys as attributes, from the first use on
      .def(
          "differences", [](const Config& a, const Config& b) { return config::differences(a, b); }, py::arg("other"))
      .def("__getattr__", [](const py::object& self, const std::string& key) {
        const py::dict keys = py::module_::import("json").attr("loads")(config::to_json(self.cast<const Config&>()));
        if (!keys.contains(key.c_str())) throw py::attribute_error("the configuration has no key " + key);
        self.attr("__dict__").attr("update")(keys);
        return py::object(keys[key.c_str()]);
      });
  module.def("parse_config", &parse, py::arg("config_json"),
             "Config, warnings and the keys that are given, from the caller's JSON and the environment (LAMINA_CONFIG, "
             "SM_HP_MP_PARAMETERS, launcher).");
  module.def("of_graphs", &config::of_graphs, py::arg("config"),
             "That of a job whose model is a graph of TensorFlow's. Raises ConfigError naming keys of torch.");
  py::class_<environment::World>(module, "World", "This process among those of its job.")
      .def_property_readonly("rank", [](const environment::World& world) { return world.rank.value; })
      .def_readonly("size", &environment::World::size)
      .def_readonly("local_rank", &environment::World::local_rank)
      .def_readonly("local_size", &environment::World::local_size)
      .def_readonly("node_rank", &environment::World::node_rank)
      .def_readonly("master_addr", &environment::World::master_addr)
      .def_readonly("master_port", &environment::World::master_port)
      .def_readonly("launched", &environment::World::launched);
  module.def(
      "read_world",
      [] { return rendezvous::meeting_outside(environment::read_world(environment::process_environment())); },
      "Returns what the launcher's environment (torchrun's variables, srun, mpirun) says; a world of one without any. "
      "Raises ConfigError naming what is missing or wrong.");
}

}  // namespace lamina::python
