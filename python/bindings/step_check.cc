// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/step_check.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "python/bindings/convert.h"
#include "python/bindings/model.h"

namespace lamina::python {
namespace {

using session::CheckedTensor;
using session::PlainValues;
using session::Session;
using session::StepCheck;
using verification::PlainRun;

using Named = verification::ParameterGradients::Named;

// PlainModel in python/lamina/verification/plain_model.py.
class PythonPlainModel : public session::PlainModel {
 public:
  explicit PythonPlainModel(py::object lent) : lent_(std::move(lent)) {}
  ~PythonPlainModel() override {
    const Acquire acquire;
    lent_ = {};
  }
  std::string run_forward(const std::shared_ptr<PlainRun>& run, const std::optional<PlainValues>& values) override {
    const Acquire acquire;
    return lent_.attr("run_forward")(run, values).cast<std::string>();
  }
  std::string run_backward(const std::map<std::int64_t, at::Tensor>& gradients) override {
    const Acquire acquire;
    return lent_.attr("run_backward")(gradients).cast<std::string>();
  }

 private:
  py::object lent_;
};

// (name, tensor, how it is sliced)
using PythonTensor = std::tuple<std::string, at::Tensor, std::optional<PythonSlicing>>;

std::vector<CheckedTensor> to_tensors(const Session& session, const std::vector<PythonTensor>& given) {
  std::vector<CheckedTensor> tensors;
  for (const auto& [name, tensor, slicing] : given) {
    tensors.push_back({name, tensor});
    if (slicing) tensors.back().slicing = to_slicing(session, *slicing);
  }
  return tensors;
}

// A check, and the session that its tensors are slices in.
struct PythonStepCheck {
  std::unique_ptr<StepCheck> check;
  const Session& session;

  void look_for_room(const std::vector<PythonTensor>& tensors) { check->look_for_room(to_tensors(session, tensors)); }
  void take_first_values(const std::vector<PythonTensor>& tensors) {
    check->take_first_values(to_tensors(session, tensors));
  }
  void take_values(const std::vector<PythonTensor>& tensors, sharding::Sharding* sharding, std::set<std::string> hooked,
                   const py::dict& attributes) {
    session::OwnValues own{to_tensors(session, tensors), sharding, std::move(hooked), {}};
    for (const auto& [name, value] : attributes) own.attributes.emplace_back(name.cast<std::string>(), to_value(value));
    const Release release;
    check->take_values(std::move(own));
  }
  void run_plainly(const py::object& model, std::vector<std::string> modules, std::vector<at::Tensor> given,
                   std::vector<Named> parameters, std::set<std::string> hooked) {
    std::optional<session::PlainCall> call;
    if (!model.is_none()) {
      call = {std::make_shared<PythonPlainModel>(model), std::move(modules), std::move(given), std::move(parameters),
              std::move(hooked)};
    }
    const Release release;
    check->run_plainly(call);
  }
  void begin_step(const std::vector<PythonTensor>& parameters) { check->begin_step(to_tensors(session, parameters)); }
};

std::unique_ptr<PythonStepCheck> of_job(Session& session) {
  auto check = StepCheck::of_job(session);
  return check == nullptr ? nullptr : std::unique_ptr<PythonStepCheck>(new PythonStepCheck{std::move(check), session});
}

void bind_plain_model(py::module_& module) {
  py::class_<PlainRun, std::shared_ptr<PlainRun>>(
      module, "PlainRun",
      "A microbatch of a model that is not cut, recorded in memory: lamina/verification/plain_run.h.")
      .def(
          "begin",
          [](const PlainRun& run, std::int64_t number, const std::vector<at::Tensor>& inputs) {
            return std::make_unique<BegunCall>(run.begin(number, inputs));
          },
          py::arg("module"), py::arg("inputs"), py::call_guard<Release>(), "A call of the module of this number.")
      .def(
          "watch", [](PlainRun& run, const std::vector<Named>& parameters) { run.watch(parameters); },
          py::arg("parameters"), "Records gradients of these parameters, by name.");
  py::class_<PlainValues>(module, "PlainValues",
                          "Values of a model that is called plainly: lamina/session/plain_values.h.")
      .def_property_readonly(
          "tensors", [](const PlainValues& values) { return values.tensors; }, "Parameters and buffers, whole.")
      .def_property_readonly(
          "attributes",
          [](const PlainValues& values) {
            py::dict attributes;
            for (const auto& [name, value] : values.attributes) attributes[py::str(name)] = to_object(value);
            return attributes;
          },
          "Attributes of modules that live elsewhere, by `module.attribute`.");
}

}  // namespace

void bind_step_check(py::module_& module) {
  const py::call_guard<Release> release;
  bind_plain_model(module);
  py::class_<PythonStepCheck>(
      module, "StepCheck",
      "The check of first steps: lamina/session/step_check.h. Tensors are given with how they are sliced.")
      .def_static("of_job", &of_job, py::arg("session"), py::keep_alive<0, 1>(), "None where no step is compared.")
      .def_property_readonly("is_over", [](const PythonStepCheck& self) { return self.check->is_over(); })
      .def_property_readonly("leads", [](const PythonStepCheck& self) { return self.check->leads(); })
      .def_property_readonly("sees_calls", [](const PythonStepCheck& self) { return self.check->sees_calls(); })
      .def("look_for_room", &PythonStepCheck::look_for_room, py::arg("tensors"), release)
      .def("take_first_values", &PythonStepCheck::take_first_values, py::arg("tensors"), release)
      .def("take_values", &PythonStepCheck::take_values, py::arg("tensors"), py::arg("sharding"), py::arg("hooked"),
           py::arg("attributes"))
      .def("run_plainly", &PythonStepCheck::run_plainly, py::arg("model"), py::arg("modules"), py::arg("given"),
           py::arg("parameters"), py::arg("hooked"), "`model`: a PlainModel; None where the step calls no model.")
      .def(
          "leave_out", [](PythonStepCheck& self, const std::string& why) { self.check->leave_out(why); },
          py::arg("why"))
      .def("begin_step", &PythonStepCheck::begin_step, py::arg("parameters"), release)
      .def(
          "see_outputs",
          [](PythonStepCheck& self, const std::vector<at::Tensor>& outputs) { self.check->see_outputs(outputs); },
          py::arg("outputs"), release)
      .def(
          "see_backward",
          [](PythonStepCheck& self, const std::vector<at::Tensor>& tensors) { self.check->see_backward(tensors); },
          py::arg("tensors"), release)
      .def(
          "run_backward", [](PythonStepCheck& self) { self.check->run_backward(); }, release)
      .def(
          "end_step", [](PythonStepCheck& self) { self.check->end_step(); }, release,
          "UsageError on all ranks where the step is not the plain model's.");
}

}  // namespace lamina::python
