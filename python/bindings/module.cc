// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "lamina/base/coded.h"
#include "lamina/base/log.h"
#include "lamina/base/own_code.h"
#include "lamina/base/printable.h"
#include "lamina/faces/sayings.h"
#include "lamina/value/encoding.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"
#include "python/bindings/hooks.h"

namespace lamina::python {

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

namespace {

void bind_texts(py::module_& module) {
  module.def(
      "said",
      [](const std::string& name, const std::vector<std::string>& values) {
        const auto place = faces::find(name);
        if (place == std::size(faces::kSayings)) {
          throw base::InternalError("a text without the name " + name);
        }
        const auto& saying = faces::kSayings[place];
        return std::pair(faces::fill(saying.text, values), saying.code.name);
      },
      py::arg("name"), py::arg("values"),
      "The text of that name in lamina/faces/sayings.h with its values, and its code, \"\" for none.");
  module.def(
      "says_info", [] { return base::says(base::Level::kInfo); },
      "True unless LAMINA_LOG asks for warnings or errors alone.");
  module.def("says_details", [] { return base::says(base::Level::kDebug); }, "True where LAMINA_LOG is \"debug\".");
  module.def(
      "coded", [](const py::bytes& text, const std::string& code) { return base::coded(std::string_view(text), code); },
      py::arg("text"), py::arg("code"),
      "The message of an error, printable: its first line ends with the code, and the whole with a line that says how "
      "to read more of it. Without a code the line is that of the error that it takes in, if any.");
  module.def("without_hints", &base::without_hints, py::arg("text"),
             "The text without the lines that say how to read more of an error.");
  module.def(
      "printable", [](const py::bytes& text) { return base::printable(std::string_view(text)); }, py::arg("text"),
      "UTF-8 with each character that a terminal would obey as \"\\x1b\"; tabs and ends of lines stay.");
  module.def(
      "printable_line", [](const py::bytes& text) { return base::printable_line(std::string_view(text)); },
      py::arg("text"), "As `printable`, and ends of lines and tabs, too.");
}

}  // namespace

}  // namespace lamina::python

PYBIND11_MODULE(_lamina, module) {
  using namespace lamina::python;
  bind_hooks(module);
  bind_config(module);
  bind_references(module);
  bind_random(module);
  bind_layers(module);
  bind_loss_scale(module);
  bind_session(module);
  bind_graph(module);
  bind_batch_record(module);
  bind_data_parallel(module);
  bind_checkpoint(module);
  bind_checkpoint_files(module);
  bind_collective(module);
  bind_sharding(module);
  bind_device_errors(module);
  bind_dist(module);
  bind_observe(module);
  bind_offload(module);
  bind_optim(module);
  bind_parameter_server(module);
  bind_parameters(module);
  bind_tensor_parallel(module);
  bind_training(module);
  bind_texts(module);
  // Python frees nothing of `kept`, and the process ends with Python, before what the libraries have is destroyed.
  module.def(
      "end_with_python",
      [](const py::object& kept) {
        kept.inc_ref();
        const auto end = [](int code, void*) {
          std::fflush(nullptr);
          ::_exit(code);
        };
        ::on_exit(end, nullptr);
      },
      py::arg("kept"),
      "At exit: lets Python end with its exit code, but never frees `kept`; the process ends then at once.");
  module.def(
      "require_own_code",
      [](const std::string& path, const std::string& variable) {
        lamina::base::require_own_code(path, variable, lamina::base::Writers::kGroup);
      },
      py::arg("path"), py::arg("variable"),
      "Refuses code that others may have put there, which a variable of the environment names: see "
      "lamina/base/own_code.h. Raises ConfigError.");
  module.def(
      "encode_roundtrip",
      [](py::handle object) {
        auto encoded = lamina::value::encode(to_value(object));
        for (auto& buffer : encoded.buffers) buffer = buffer.clone();
        return to_object(lamina::value::decode(encoded.meta, std::move(encoded.buffers)));
      },
      py::arg("value"), "Value tree there and back through bytes: for tests.");
}
