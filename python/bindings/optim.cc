// SPDX-License-Identifier: Apache-2.0
// Optimizers of Python, whose states lie in the dict that torch's have.
#include <ATen/ops/scalar_tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/optim/functional.h"
#include "lamina/optim/registry.h"
#include "lamina/optim/step.h"
#include "lamina/session/optimizer_steps.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using fused::StateKind;
using optim::Functional;
using Shared = std::shared_ptr<const Functional>;

optim::Registry& registry() {
  static optim::Registry registry;
  return registry;
}

double number_of(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.scalar_type() == at::kFloat) return *tensor.const_data_ptr<float>();
  if (tensor.is_cpu() && tensor.scalar_type() == at::kDouble) return *tensor.const_data_ptr<double>();
  return tensor.item<double>();
}

void set_number(at::Tensor& tensor, double value) {
  if (tensor.is_cpu() && tensor.scalar_type() == at::kFloat) {
    *tensor.mutable_data_ptr<float>() = static_cast<float>(value);
  } else if (tensor.is_cpu() && tensor.scalar_type() == at::kDouble) {
    *tensor.mutable_data_ptr<double>() = value;
  } else {
    tensor.fill_(value);
  }
}

// Fields of a state, with their names as keys of a dict.
struct Fields {
  explicit Fields(const Functional& functional) : all(functional.declaration().states) {
    for (const auto& field : all)
      names.emplace_back(py::reinterpret_steal<py::str>(PyUnicode_InternFromString(field.name)));
  }

  std::span<const fused::StateField> all;
  std::vector<py::str> names;
};

// A parameter with its state, as `optimizer.state` has it: one entry per field that is in use. Counts of steps are
// float32, as torch's, other numbers float64.
class Slot {
 public:
  Slot(py::object parameter, const py::dict& states) : key_(std::move(parameter)) {
    parameter_ = THPVariable_Unpack(key_.ptr());
    if (auto* found = PyDict_GetItemWithError(states.ptr(), key_.ptr()))
      entry_ = py::reinterpret_borrow<py::dict>(found);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  }

  const py::object& key() const { return key_; }

  const at::Tensor& parameter() const { return parameter_; }

  // Takes what somebody has put into the dict meanwhile.
  optim::Update begin(const Fields& fields) {
    const auto& gradient = parameter_.grad();
    if (gradient.defined() && entry_) read(fields);
    return {.parameter = parameter_, .gradient = gradient, .state = &state_};
  }

  void end(const Fields& fields, const py::dict& states) {
    if (!parameter_.grad().defined()) return;
    if (!entry_) {
      entry_ = py::dict();
      states[key_] = entry_;
    }
    fields_.resize(fields.all.size());
    std::size_t tensor = 0, number = 0;
    for (std::size_t i = 0; i < fields_.size(); ++i) {
      if (fields.all[i].kind != StateKind::kNumber) {
        put(fields.names[i], fields_[i], state_.tensors.at(tensor++));
        continue;
      }
      const double value = state_.numbers.at(number++);
      if (!fields_[i].defined()) {
        const auto type = std::string_view(fields.all[i].name) == "step" ? at::kFloat : at::kDouble;
        put(fields.names[i], fields_[i], at::scalar_tensor(value, type));
      }
      set_number(fields_[i], value);
    }
  }

 private:
  void put(const py::str& name, at::Tensor& known, const at::Tensor& tensor) {
    if (!tensor.defined() || known.is_same(tensor)) return;
    known = tensor;
    entry_[name] = tensor;
  }

  void read(const Fields& fields) {
    fields_.resize(fields.all.size());
    state_.tensors.clear();
    state_.numbers.clear();
    bool any = false;
    for (std::size_t i = 0; i < fields_.size(); ++i) {
      auto* found = PyDict_GetItemWithError(entry_.ptr(), fields.names[i].ptr());
      if (found != nullptr && THPVariable_Check(found)) {
        if (const auto& tensor = THPVariable_Unpack(found); !fields_[i].is_same(tensor)) fields_[i] = tensor;
      } else {
        fields_[i].reset();
      }
      any = any || fields_[i].defined();
      if (fields.all[i].kind != StateKind::kNumber) {
        state_.tensors.push_back(fields_[i]);
      } else {
        state_.numbers.push_back(fields_[i].defined() ? number_of(fields_[i]) : 0);
      }
    }
    state_.started = any;
    if (!any) state_ = {};
  }

  py::object key_;
  at::Tensor parameter_;
  py::dict entry_{py::reinterpret_steal<py::dict>(py::handle())};
  optim::State state_;
  std::vector<at::Tensor> fields_;  // the state's tensors, numbers too; undefined where unused
};

// The parameters of a group, in the list that the optimizer has.
class OptimizerGroup {
 public:
  OptimizerGroup(Shared functional, const py::list& parameters, py::dict states)
      : functional_(std::move(functional)), fields_(*functional_), states_(std::move(states)) {
    for (const auto& parameter : parameters)
      slots_.emplace_back(py::reinterpret_borrow<py::object>(parameter), states_);
    on_cpu_ = std::ranges::all_of(slots_, [](const auto& slot) { return slot.parameter().is_cpu(); });
  }

  bool on_cpu() const { return on_cpu_; }

  // True while the list has the same parameters and the dict is the same.
  bool is_of(const py::list& parameters, const py::dict& states) const {
    if (states.ptr() != states_.ptr() || parameters.size() != slots_.size()) return false;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (PyList_GET_ITEM(parameters.ptr(), static_cast<Py_ssize_t>(i)) != slots_[i].key().ptr()) return false;
    }
    return true;
  }

  double squared_gradient_norm(double scale) {
    auto updates = begin();
    const auto helpers = optim::shared_threads();
    const py::gil_scoped_release release;
    return optim::squared_gradient_norm(updates, scale, *helpers);
  }

  // Updates those that have gradients, which are multiplied by `scale` first; `gradient_norm`: of all of the model's.
  // Halves that parameters stand in for, which `steps` knows, get their values, too.
  void step(const std::vector<double>& hyper, double scale, double gradient_norm, session::OptimizerSteps* steps) {
    auto updates = begin();
    for (auto& update : updates) {
      if (const auto number = steps == nullptr ? std::nullopt : steps->stand_ins().find(update.parameter)) {
        update.copy = steps->stand_ins().half_copy(*number);
      }
    }
    {
      const auto helpers = optim::shared_threads();
      const py::gil_scoped_release release;
      const optim::Step given{.hyper = hyper, .gradient_scale = scale, .gradient_norm = gradient_norm};
      functional_->check(given.hyper);
      functional_->measure(given, updates, *helpers);
      functional_->update(given, updates, *helpers);
    }
    for (auto& slot : slots_) slot.end(fields_, states_);
  }

 private:
  std::vector<optim::Update> begin() {
    std::vector<optim::Update> updates;
    updates.reserve(slots_.size());
    for (auto& slot : slots_) updates.push_back(slot.begin(fields_));
    return updates;
  }

  const Shared functional_;
  const Fields fields_;
  const py::dict states_;
  std::vector<Slot> slots_;
  bool on_cpu_ = true;
};

py::list hyper_fields(const Functional& functional) {
  py::list fields;
  for (const auto& field : functional.declaration().hyper) {
    py::list choices;
    if (field.bound == fused::Bound::kChoice) choices = py::str(field.choices).attr("split")();
    fields.append(py::make_tuple(field.name, choices, field.preset));
  }
  return fields;
}

}  // namespace

void bind_optim(py::module_& module) {
  bind_optimizer_steps(module);
  py::class_<Functional, std::shared_ptr<Functional>>(module, "Functional")
      .def_property_readonly("hyper", &hyper_fields)
      .def_property_readonly("norm",
                             [](const Functional& functional) { return functional.declaration().gradient_norm; })
      .def_property_readonly(
          "needs_elements_alone",
          [](const Functional& functional) { return functional.declaration().needs == fused::Needs::kElements; })
      .def(
          "check", [](const Functional& functional, const std::vector<double>& hyper) { functional.check(hyper); },
          py::arg("hyper"));
  module.def(
      "functional", [](const std::string& name) { return std::const_pointer_cast<Functional>(registry().find(name)); },
      py::arg("name"));
  py::class_<OptimizerGroup>(module, "OptimizerGroup")
      .def(py::init<Shared, const py::list&, py::dict>(), py::arg("functional"), py::arg("parameters"),
           py::arg("states"))
      .def_property_readonly("on_cpu", &OptimizerGroup::on_cpu)
      .def("is_of", &OptimizerGroup::is_of, py::arg("parameters"), py::arg("states"))
      .def("squared_gradient_norm", &OptimizerGroup::squared_gradient_norm, py::arg("scale"))
      .def("step", &OptimizerGroup::step, py::arg("hyper"), py::arg("scale"), py::arg("gradient_norm"),
           py::arg("steps").none(true) = nullptr);
}

}  // namespace lamina::python
