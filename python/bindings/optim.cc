// SPDX-License-Identifier: Apache-2.0
// Optimizers of Python, whose states lie in the dict that torch's have.
#include <ATen/ops/scalar_tensor.h>
#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/device/capabilities.h"
#include "lamina/distributed_optimizer/local_parameters.h"
#include "lamina/optim/functional.h"
#include "lamina/optim/registry.h"
#include "lamina/optim/step.h"
#include "lamina/optim/update_tensors.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using fused::StateKind;
using optim::Functional;
using Shared = std::shared_ptr<const Functional>;

double number_of(const at::Tensor& tensor) {
  if (devices::is_host(tensor) && tensor.scalar_type() == at::kFloat) return *tensor.const_data_ptr<float>();
  if (devices::is_host(tensor) && tensor.scalar_type() == at::kDouble) return *tensor.const_data_ptr<double>();
  return tensor.item<double>();
}

void set_number(at::Tensor& tensor, double value) {
  if (devices::is_host(tensor) && tensor.scalar_type() == at::kFloat) {
    *tensor.mutable_data_ptr<float>() = static_cast<float>(value);
  } else if (devices::is_host(tensor) && tensor.scalar_type() == at::kDouble) {
    *tensor.mutable_data_ptr<double>() = value;
  } else {
    tensor.fill_(value);
  }
}

// Fields of a state, with their names as keys of a dict.
struct Fields {
  explicit Fields(const Functional& functional) : all(functional.declaration().states) {
    for (const auto& field : all) {
      names.emplace_back(py::reinterpret_steal<py::str>(PyUnicode_InternFromString(field.name)));
      tensors += fused::is_number(field.kind) ? 0 : 1;
    }
  }

  std::span<const fused::StateField> all;
  std::vector<py::str> names;
  std::size_t tensors = 0;  // how many are no numbers
};

// The version of a dict, which another one has whenever an item was set, or taken away; 0 where Python keeps none.
std::uint64_t version_of([[maybe_unused]] const py::dict& dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict.ptr())->ma_version_tag;
#else
  return 0;
#endif
}

// A parameter with its state, as `optimizer.state` has it: one entry per field that is in use. Numbers lie on the CPU,
// those of torch's classes in the type that they have there, others in float64.
class Slot {
 public:
  explicit Slot(py::object parameter) : key_(std::move(parameter)), hash_(py::hash(key_)) {}

  // Looks for the entry in `states`: a program may have taken it away, or put another one there.
  void find_entry(const py::dict& states) {
    auto* const found = _PyDict_GetItem_KnownHash(states.ptr(), key_.ptr(), hash_);  // else a call of Python's
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (found == entry_.ptr()) return;
    entry_ = py::reinterpret_borrow<py::dict>(found);
    version_ = 0;
    state_ = {};
    fields_.clear();
  }

  const py::object& key() const { return key_; }

  // Not kept: torch.utils.swap_tensors gives the object of Python another one.
  const at::Tensor& parameter() const { return THPVariable_Unpack(key_.ptr()); }

  // Takes what somebody has put into the dict meanwhile.
  optim::Update begin(const Fields& fields, const at::Tensor& parameter, const at::Tensor& gradient) {
    changes_ = gradient.defined();
    if (changes_ && entry_) read(fields);
    state_.made = false;
    return {.parameter = &parameter, .gradient = &gradient, .state = &state_};
  }

  // Puts what the step has made into the entry; into a new one of `states`, if there is none.
  void end(const Fields& fields, const py::dict& states) {
    if (!changes_) return;
    if (entry_ && !state_.made && fields.tensors == fields.all.size()) {  // it has all there is
      version_ = begun_;
      return;
    }
    bool puts = false;
    fields_.resize(fields.all.size());
    std::size_t tensor = 0, number = 0;
    for (std::size_t i = 0; i < fields_.size(); ++i) {
      if (!fused::is_number(fields.all[i].kind)) {
        puts |= put(fields.names[i], fields_[i], state_.tensors.at(tensor++), states);
        continue;
      }
      const double value = state_.numbers.at(number++);
      if (!fields_[i].defined()) {
        const bool is_torchs = fields.all[i].kind == StateKind::kTorchsNumber;
        const auto type = is_torchs && !optim::torchs_numbers_are_double() ? at::kFloat : at::kDouble;
        puts |= put(fields.names[i], fields_[i], at::scalar_tensor(value, type), states);
      }
      set_number(fields_[i], value);
    }
    if (!puts) version_ = begun_;
  }

 private:
  bool put(const py::str& name, at::Tensor& known, const at::Tensor& tensor, const py::dict& states) {
    if (!tensor.defined() || known.is_same(tensor)) return false;
    if (!entry_) {
      py::dict entry;
      states[key_] = entry;
      entry_ = std::move(entry);
    }
    entry_[name] = tensor;
    known = tensor;
    return true;
  }

  void read(const Fields& fields) {
    if (version_ == 0 || version_of(entry_) != version_) {
      read_all(fields);
    } else {
      std::size_t numbers = 0;
      for (std::size_t i = 0; i < fields_.size(); ++i) {
        if (!fused::is_number(fields.all[i].kind)) continue;
        if (fields_[i].defined()) state_.numbers[numbers] = number_of(fields_[i]);
        ++numbers;
      }
    }
    begun_ = version_of(entry_);
    version_ = 0;  // until the step has ended as it should
  }

  void read_all(const Fields& fields) {
    fields_.resize(fields.all.size());
    state_.tensors.resize(fields.tensors);
    state_.numbers.resize(fields.all.size() - fields.tensors);
    std::size_t tensors = 0, numbers = 0;
    bool any = false;
    for (std::size_t i = 0; i < fields_.size(); ++i) {
      auto* found = PyDict_GetItemWithError(entry_.ptr(), fields.names[i].ptr());
      if (found != nullptr && THPVariable_Check(found)) {
        fields_[i] = THPVariable_Unpack(found);
        if (fused::is_number(fields.all[i].kind) && !devices::is_host(fields_[i]) && !fields_[i].is_meta()) {
          entry_[fields.names[i]] = fields_[i] = devices::on_host(fields_[i]);  // waits for the device this once
        }
      } else {
        fields_[i].reset();
      }
      any = any || fields_[i].defined();
      if (!fused::is_number(fields.all[i].kind)) {
        state_.tensors[tensors++] = fields_[i];
      } else if (found != nullptr && (PyFloat_Check(found) || PyLong_Check(found))) {
        state_.numbers[numbers++] = PyFloat_AsDouble(found);
        any = true;
      } else {
        state_.numbers[numbers++] = fields_[i].defined() ? number_of(fields_[i]) : 0;
      }
    }
    state_.started = any;
    if (!any) state_ = {};
  }

  py::object key_;
  Py_hash_t hash_;
  py::dict entry_{py::reinterpret_steal<py::dict>(py::handle())};
  std::uint64_t version_ = 0;  // of the entry that `fields_` and `state_` are from; 0: it is to be read
  std::uint64_t begun_ = 0;    // the one that this step began with
  bool changes_ = false;       // in this step
  optim::State state_;
  std::vector<at::Tensor> fields_;  // the state's tensors, numbers too; undefined where unused
};

// One for each parameter of a group; None where it is left alone.
using Gradients = std::vector<std::optional<at::Tensor>>;

// References to the parameters of a step, and to their gradients. While the GIL is released, another thread may give
// the objects of Python other ones; torch.utils.swap_tensors refuses a tensor that somebody has a reference to. Where
// there is no other thread, none is taken, for they cost as much as all else that is asked of a small parameter.
class HeldTensors {
 public:
  explicit HeldTensors(std::size_t most)
      : needed_(PyThreadState_Next(PyInterpreterState_ThreadHead(PyInterpreterState_Get())) != nullptr) {
    if (needed_) tensors_.reserve(most);
  }

  // Valid as long as this object.
  const at::Tensor& hold(const at::Tensor& tensor) { return needed_ ? tensors_.emplace_back(tensor) : tensor; }

 private:
  const bool needed_;
  std::vector<at::Tensor> tensors_;
};

// The parameters of a group, in the list that the optimizer has.
class OptimizerGroup {
 public:
  OptimizerGroup(Shared functional, const py::list& parameters, py::dict states)
      : functional_(std::move(functional)), fields_(*functional_), states_(std::move(states)) {
    for (const auto& parameter : parameters) {
      slots_.emplace_back(py::reinterpret_borrow<py::object>(parameter));
    }
    std::vector<const void*> objects;
    for (const auto& slot : slots_) objects.push_back(slot.key().ptr());
    std::ranges::sort(objects);
    each_once_ = std::ranges::adjacent_find(objects) == objects.end();
  }

  bool each_once() const { return each_once_; }
  // Asked anew in each step: torch.utils.swap_tensors may have given a parameter another class.
  bool have_own_elements() const {
    return std::ranges::all_of(slots_, [](const Slot& slot) { return optim::has_own_elements(slot.parameter()); });
  }
  const Functional& functional() const { return *functional_; }

  // True while the list has the same parameters, and the states are the same.
  bool is_of(const py::list& parameters, const py::dict& states) const {
    if (states.ptr() != states_.ptr() || parameters.size() != slots_.size()) return false;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (PyList_GET_ITEM(parameters.ptr(), static_cast<Py_ssize_t>(i)) != slots_[i].key().ptr()) return false;
    }
    return true;
  }

  std::size_t size() const { return slots_.size(); }

  // The thread that takes a step with it; 0: none.
  unsigned long taken_by() const { return taken_by_; }
  void set_taken_by(unsigned long thread) { taken_by_ = thread; }

  std::vector<optim::Update> begin(HeldTensors& held, const std::optional<Gradients>& gradients) {
    if (version_ == 0 || version_of(states_) != version_) {
      for (auto& slot : slots_) slot.find_entry(states_);
      version_ = version_of(states_);
    }
    return updates_of(gradients, [&](Slot& slot, const at::Tensor& gradient) {
      return slot.begin(fields_, held.hold(slot.parameter()), held.hold(gradient));
    });
  }

  // Updates that have gradients, and nothing else.
  std::vector<optim::Update> gradients(HeldTensors& held, const std::optional<Gradients>& gradients) {
    return updates_of(
        gradients, [&](Slot&, const at::Tensor& gradient) { return optim::Update{.gradient = &held.hold(gradient)}; });
  }

  // Returns the error of an entry that could not be made. The contexts of all others are, for their update is over.
  std::exception_ptr end() {
    std::exception_ptr error;
    for (auto& slot : slots_) {
      try {
        slot.end(fields_, states_);
      } catch (py::error_already_set&) {
        error = std::current_exception();
        end_again(slot);
      }
    }
    return error;
  }

 private:
  // Tries once more: a signal, as Ctrl-C is, may have come while Python asked the key for its hash.
  void end_again(Slot& slot) {
    try {
      slot.end(fields_, states_);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the state of a parameter");
    }
  }

  // `gradients`: else each parameter has its own.
  template <class UpdateOf>
  std::vector<optim::Update> updates_of(const std::optional<Gradients>& gradients, const UpdateOf& update_of) {
    static const at::Tensor none;
    std::vector<optim::Update> updates;
    updates.reserve(slots_.size());
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      if (gradients) {
        const auto& gradient = gradients->at(i);
        updates.push_back(update_of(slot, gradient ? *gradient : none));
      } else {
        // Without the warning for what is no leaf.
        updates.push_back(update_of(slot, std::as_const(*slot.parameter().unsafeGetTensorImpl()).grad()));
      }
    }
    return updates;
  }

  const Shared functional_;
  const Fields fields_;
  const py::dict states_;
  std::vector<Slot> slots_;
  std::uint64_t version_ = 0;  // of `states_` when entries were looked for; 0: they are to be
  bool each_once_ = true;
  unsigned long taken_by_ = 0;
};

// Groups in a step of this thread. A finaliser that Python calls in the middle of it cannot take another one.
class Taken {
 public:
  explicit Taken(const std::vector<OptimizerGroup*>& groups) : groups_(groups) {
    const auto thread = PyThread_get_thread_ident();
    if (std::ranges::find(groups_, thread, &OptimizerGroup::taken_by) != groups_.end()) {
      throw base::UsageError(
          "a step of an optimizer within its own step: a finaliser, or a signal handler, has called "
          "step(); let it set a flag, and call step() where the program sees that");
    }
    for (auto* group : groups_) group->set_taken_by(thread);
  }

  ~Taken() {
    for (auto* group : groups_) group->set_taken_by(0);
  }

  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

 private:
  const std::vector<OptimizerGroup*>& groups_;
};

// Tensors that a step may have to hold.
std::size_t most_held(const std::vector<OptimizerGroup*>& groups) {
  std::size_t size = 0;
  for (const auto* group : groups) size += 2 * group->size();
  return size;
}

// `gradients`: of the only group; else each parameter has its own.
double squared_gradient_norm(const std::vector<OptimizerGroup*>& groups, double scale,
                             const std::optional<Gradients>& gradients) {
  base::internal_check(!gradients || groups.size() == 1, "gradients of one group");
  HeldTensors held(most_held(groups));
  std::vector<std::vector<optim::Update>> all;
  for (auto* group : groups) all.push_back(group->gradients(held, gradients));
  const py::gil_scoped_release release;
  const std::vector<std::span<optim::Update>> updates(all.begin(), all.end());
  return optim::squared_gradient_norm(updates, scale, *optim::shared_threads());
}

// With the hyper-parameters of each group. `around` may be nullptr.
void step(const std::vector<OptimizerGroup*>& groups, const std::vector<std::vector<double>>& hyper, double scale,
          double gradient_norm, const std::optional<Gradients>& gradients,
          const distributed_optimizer::LocalParameters* around) {
  base::internal_check(!gradients || groups.size() == 1, "gradients of one group");
  const Taken taken(groups);
  HeldTensors held(most_held(groups));
  std::vector<optim::GroupStep> steps;
  for (auto* group : groups) steps.push_back({{}, group->begin(held, gradients)});
  {
    const py::gil_scoped_release release;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      steps[i].step = {.hyper = hyper.at(i), .gradient_scale = scale, .gradient_norm = gradient_norm};
    }
    const auto helpers = optim::shared_threads();
    if (around != nullptr && !groups.empty()) {
      around->update(groups.front()->functional(), steps, *helpers);
    } else if (!groups.empty()) {
      optim::step_groups(groups.front()->functional(), steps, *helpers);
    }
  }
  std::exception_ptr error;
  for (auto* group : groups) {
    if (auto raised = group->end()) error = raised;
  }
  if (error) std::rethrow_exception(error);
}

const char* needs(const Functional& functional) {
  switch (functional.declaration().needs) {
    case fused::Needs::kElements:
      return "elements";
    case fused::Needs::kNorms:
      return "norms";
    case fused::Needs::kWhole:
      return "whole";
  }
  throw base::InternalError("an optimizer with other needs");
}

py::list hyper_fields(const Functional& functional) {
  py::list fields;
  std::string_view tuple;
  int place = 0;  // in it
  for (const auto& field : functional.declaration().hyper) {
    py::list choices;
    if (field.bound == fused::Bound::kChoice) choices = py::str(field.choices).attr("split")();
    place = field.tuple == tuple ? place + 1 : 0;
    tuple = field.tuple;
    const bool alone = tuple.empty();
    fields.append(py::make_tuple(alone ? field.name : field.tuple, alone ? py::object(py::none()) : py::int_(place),
                                 choices, field.preset));
  }
  return fields;
}

py::list number_fields(const Functional& functional) {
  py::list names;
  for (const auto& field : functional.declaration().states) {
    if (fused::is_number(field.kind)) names.append(field.name);
  }
  return names;
}

}  // namespace

void bind_optim(py::module_& module) {
  bind_optimizer(module);
  py::class_<Functional, std::shared_ptr<Functional>>(
      module, "Functional", "An optimizer as a function of memory; see lamina/optim/functional.h.")
      .def_property_readonly("hyper", &hyper_fields,
                             "Its hyper-parameters: the key of a group, the place in the tuple that it has there, the "
                             "words of which one is an index, and what holds where nothing is given.")
      .def_property_readonly(
          "norm", [](const Functional& functional) { return functional.declaration().gradient_norm; },
          "True where it needs the norm of all gradients.")
      .def_property_readonly(
          "needs", &needs, "Says what it has to know of a parameter: see [Note: needs] in lamina/fused/declaration.h.")
      .def_property_readonly("numbers", &number_fields, "The states that are one number for a parameter, by name.")
      .def(
          "check", [](const Functional& functional, const std::vector<double>& hyper) { functional.check(hyper); },
          py::arg("hyper"), "UsageError for values that it does not take.");
  module.def(
      "functional",
      [](const std::string& name) { return std::const_pointer_cast<Functional>(optim::shared_registry().find(name)); },
      py::arg("name"), "The form of the optimizer of that name.");
  module.def(
      "load_functional", [](const std::string& path) { return optim::shared_registry().load(path); }, py::arg("path"),
      "Adds the optimizer of a shared library, see lamina/fused/plugin.h, and returns its name.");
  py::class_<OptimizerGroup>(module, "OptimizerGroup",
                             "Parameters of a group, with the states that the optimizer's `state` has of them.")
      .def(py::init<Shared, const py::list&, py::dict>(), py::arg("functional"), py::arg("parameters"),
           py::arg("states"))
      .def_property_readonly("each_once", &OptimizerGroup::each_once, "False where a parameter is listed twice.")
      .def_property_readonly("have_own_elements", &OptimizerGroup::have_own_elements,
                             "False where a parameter is of a tensor subclass with a dispatch of its own.")
      .def("is_of", &OptimizerGroup::is_of, py::arg("parameters"), py::arg("states"),
           "True where these are its parameters, and this its dict.");
  module.def("functions_are_recorded", &at::hasCallbacks,
             "True where a profiler, or another observer of torch's, is told of functions.");
  module.def("squared_gradient_norm", &squared_gradient_norm, py::arg("groups"), py::arg("scale"),
             py::arg("gradients") = py::none(),
             "Sum of the squares of all gradients, which are multiplied by `scale` first.\n\nArgs: gradients: those of "
             "the only group; each parameter's own where they are not given.");
  module.def("optimizer_step", &step, py::arg("groups"), py::arg("hyper"), py::arg("scale"), py::arg("gradient_norm"),
             py::arg("gradients") = py::none(), py::arg("around") = py::none(),
             "Updates parameters that have gradients, which are multiplied by `scale` first. Releases the GIL; with "
             "parts and an optimizer that needs norms collective over their holders. From one thread at a time for the "
             "same groups.\n\nArgs: hyper: of each group, the hyper-parameters. gradients: those of the only group; "
             "each parameter's own where they are not given. around: knows halves that parameters stand in for, which "
             "get their values, too.");
}

}  // namespace lamina::python
