// SPDX-License-Identifier: Apache-2.0
// Options of transformers' layers: python/lamina/layers. What layers compute are operators of torch's dispatcher.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/faces/sayings.h"
#include "lamina/layers/operators.h"
#include "lamina/layers/options.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using layers::Option;
using layers::TransformerOptions;

const char* described_kind(const bool&) { return "true or false"; }
const char* described_kind(const std::int64_t&) { return "an integer"; }
const char* described_kind(const double&) { return "a number"; }
const char* described_kind(const std::string&) { return "a string"; }
const char* described_kind(const std::optional<std::int64_t>&) { return "an integer or None"; }
const char* described_kind(const std::optional<double>&) { return "a number or None"; }

// Throws base::UsageError for a value of another kind.
void read_option(TransformerOptions& options, const Option& option, const py::handle& value) {
  std::visit(
      [&](auto field) {
        auto& place = options.*field;
        try {
          place = value.cast<std::remove_reference_t<decltype(place)>>();
        } catch (const py::cast_error&) {
          throw faces::refusal("not-an-option", option.name, described_kind(place),
                               py::repr(value).cast<std::string>());
        }
      },
      option.field);
}

py::object option_value(const TransformerOptions& options, const Option& option) {
  return std::visit([&](auto field) { return py::cast(options.*field); }, option.field);
}

TransformerOptions options_from(const py::dict& given) {
  TransformerOptions options;
  for (const auto& option : layers::every_option()) {
    if (const py::str name(std::string(option.name)); given.contains(name)) read_option(options, option, given[name]);
  }
  return options;
}

py::dict options_dict(const TransformerOptions& options) {
  py::dict made;
  for (const auto& option : layers::every_option()) {
    made[py::str(std::string(option.name))] = option_value(options, option);
  }
  return made;
}

}  // namespace

void bind_layers(py::module_& module) {
  module.def(
      "layer_arguments",
      [](const std::string& layer) {
        std::vector<std::tuple<std::string, py::object, bool>> arguments;
        for (const auto& [option, takes_place] : layers::arguments_of(layer)) {
          arguments.emplace_back(option.name, option_value({}, option), takes_place);
        }
        return arguments;
      },
      py::arg("layer"),
      "Names and defaults of the arguments of a layer, by the name of its class, and whether each may be given by its "
      "place.");
  module.def(
      "layer_options",
      [](const std::string& layer, const py::dict& given) {
        const auto options = options_from(given);
        layers::check(layer, options);
        return options_dict(options);
      },
      py::arg("layer"), py::arg("given"), "All options of a transformer, with those that its layer was given.");
  module.def(
      "options_of_part",
      [](const py::dict& options) { return options_dict(layers::options_of_part(options_from(options))); },
      py::arg("options"), "The options of a layer's attention, or of its output.");
  module.def("activations", &layers::activations, "The names of activations that layers have.");
}

}  // namespace lamina::python
