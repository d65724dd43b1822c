// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "lamina/config/training_settings.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using config::Scalar;
using config::UserValue;

// None, a number or a text; else the text in errors alone. An integer beyond 64 bits is a number with a point.
Scalar scalar(py::handle value) {
  if (value.is_none()) return {};
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (py::isinstance<py::list>(value)) return value.cast<std::vector<std::string>>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (!py::isinstance<py::int_>(value)) return config::Unreadable{};
  int overflow = 0;
  const auto whole = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0) return std::int64_t{whole};
  const double number = PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred() == nullptr) return number;
  PyErr_Clear();
  return config::Unreadable{};
}

// Words of lamina.composer.user_words.
UserValue user_value(const py::tuple& words) {
  const py::object value = words[0];
  UserValue found{config::Unreadable{}, words[1].cast<std::string>()};
  if (!py::isinstance<py::dict>(value)) {
    found.value = scalar(value);
    return found;
  }
  found.entries.emplace();
  for (const auto& [key, held] : value.cast<py::dict>()) {
    found.entries->push_back({py::str(key), py::repr(key), user_value(held.cast<py::tuple>())});
  }
  return found;
}

std::optional<UserValue> given_value(const py::tuple& words) {
  return words[0].is_none() ? std::nullopt : std::optional(user_value(words));
}

py::object to_python(const Scalar& value) {
  return std::visit(
      [](const auto& held) -> py::object {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<Held, std::monostate> || std::is_same_v<Held, config::Unreadable>) {
          return py::none();
        } else {
          return py::cast(held);
        }
      },
      value);
}

py::dict to_python(const config::InitKeys& keys) {
  py::dict found;
  for (const auto& [name, value] : keys) found[py::str(name)] = to_python(value);
  return found;
}

// Arguments of lamina.DistributedOptimizer.
py::dict optimizer_arguments(const std::optional<config::ScaleOptions>& scale) {
  using namespace py::literals;
  if (!scale) return {};
  if (scale->fixed) return py::dict("static_loss_scale"_a = *scale->fixed);
  const auto& dynamic = scale->dynamic;
  const py::dict args("init_scale"_a = dynamic.init_scale, "scale_window"_a = dynamic.scale_window,
                      "min_scale"_a = dynamic.min_scale, "delayed_shift"_a = dynamic.delayed_shift,
                      "consecutive_hysteresis"_a = dynamic.consecutive_hysteresis);
  return py::dict("dynamic_loss_scale"_a = true, "dynamic_loss_args"_a = args);
}

py::dict training_settings(const py::tuple& fsdp_config, const py::tuple& deepspeed_config, const py::tuple& precision,
                           const py::tuple& lamina_config, int ranks, const std::string& device_type,
                           std::optional<std::int64_t> batch_size, const py::object& microbatch_size,
                           std::optional<std::int64_t> microbatches) {
  using namespace py::literals;
  config::TrainingArguments given{given_value(fsdp_config), given_value(deepspeed_config), user_value(precision),
                                  given_value(lamina_config)};
  given.ranks = ranks;
  given.device_type = device_type;
  given.batch_size = batch_size;
  given.microbatch_size = scalar(microbatch_size);
  given.microbatches = microbatches;
  const auto found = config::training_settings(given);
  return py::dict(
      "precision"_a = config::name_of(found.precision), "autocast"_a = config::name_of(found.autocast),
      "layout"_a = found.layout.empty() ? std::nullopt : std::optional(found.layout), "keys"_a = to_python(found.keys),
      "grad_scaler"_a = found.scales_losses, "optimizer_arguments"_a = optimizer_arguments(found.optimizer_scale),
      "clipping_norm"_a = found.clipping_norm, "activation_checkpointing"_a = found.activation_checkpointing,
      "min_params"_a = found.min_params, "verbose"_a = found.verbose, "unheeded"_a = found.without_effect);
}

}  // namespace

void bind_training(py::module_& module) {
  module.def("training_settings", &training_settings, py::arg("fsdp_config"), py::arg("deepspeed_config"),
             py::arg("precision"), py::arg("lamina_config"), py::arg("ranks"), py::arg("device_type"),
             py::arg("batch_size"), py::arg("microbatch_size"), py::arg("microbatches"),
             "Settings of a training, of words of lamina.composer.user_words; see lamina/config/training_settings.h. "
             "ConfigError: all that is wrong with them.");
  module.def(
      "precision_named",
      [](const std::string& name) {
        const auto found = config::find_precision(name);
        return found ? std::optional(config::name_of(*found)) : std::nullopt;
      },
      py::arg("name"),
      "The name of a precision in place of an older one, in any case of its letters; None where there is no such one.");
  module.def(
      "read_precision",
      [](const py::tuple& words, const std::string& device_type) {
        return config::name_of(config::read_precision(user_value(words), device_type));
      },
      py::arg("words"), py::arg("device_type"),
      "The name of a precision; None is the default of that device. ConfigError: there is no such precision.");
}

}  // namespace lamina::python
