// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <span>

#include "lamina/base/error.h"
#include "lamina/base/module_names.h"
#include "lamina/base/str.h"
#include "lamina/distributed_optimizer/optimizer.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/sharding/sharding.h"
#include "lamina/value/guarded.h"
#include "lamina/value/released.h"
#include "python/bindings/bindings.h"
#include "python/bindings/hooks.h"

// `.grad` and `.data` of parameters that other ranks own: None here, which looks as if there was no gradient, and what
// nobody would ever see. Sharded parameters have the gradient of this rank's shard as `.grad`. A tensor that stands for
// one in an optimizer ([Note: stand-ins]) has its part of that gradient. A script that reads that of a slice has it
// guarded ([Note: guarded slices]); torch and we take its elements one by one, or measure all slices. The parameters
// stay of torch's class, whose attributes these take the place of, at their cost.
namespace lamina::python {
namespace {

// An attribute of torch's tensors, and what takes its place in a class under them.
using distributed_optimizer::LocalParameters;

struct Attribute {
  PyGetSetDef ours;
  getter get = nullptr;  // torch's
  setter set = nullptr;
};

PyObject* get_gradient(PyObject* self, void* closure);
int set_gradient(PyObject* self, PyObject* value, void* closure);
PyObject* get_data(PyObject* self, void* closure);
int set_data(PyObject* self, PyObject* value, void* closure);

Attribute gradient{{"grad", &get_gradient, &set_gradient, nullptr, nullptr}};
Attribute data{{"data", &get_data, &set_data, nullptr, nullptr}};
bool told = false, told_of_shards = false;
std::weak_ptr<sharding::Sharding> sharded;                                // whose parameters are looked for
std::vector<std::weak_ptr<distributed_optimizer::Optimizer>> optimizers;  // whose stand-ins are

// Packages that look at every gradient, and know: torch and ours for optimizers and the like, others in loops that
// leave norms and clipping to torch's functions.
constexpr std::array kKnow = {
    "torch", "lamina", "accelerate", "transformers", "lightning_fabric", "pytorch_lightning", "lightning"};
constexpr auto kTakeEach = std::span(kKnow).first(2);  // those that take elements of slices one by one

// True where the Python code that runs is one of theirs.
bool reader_knows(std::span<const char* const> packages = kKnow) {
  PyObject* globals = PyEval_GetGlobals();
  if (globals == nullptr) return true;
  PyObject* name = PyDict_GetItemString(globals, "__name__");
  if (name == nullptr || !PyUnicode_Check(name)) return false;
  const auto module = py::handle(name).cast<std::string>();
  return std::ranges::any_of(packages, [&](const char* package) { return base::is_in_module(module, package); });
}

// Says `text` once, in the place of torch's result `found` where warnings are errors.
PyObject* tell(PyObject* found, bool& told, const std::string& text) {
  told = true;
  if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) == 0) return found;
  Py_DECREF(found);
  return nullptr;
}

// A sharded parameter.
struct Shard {
  std::shared_ptr<sharding::Sharding> sharding;
  std::size_t number;
};

std::optional<Shard> shard_of(const at::Tensor& parameter) {
  auto sharding = sharded.lock();
  const auto number = sharding ? sharding->find(parameter) : std::nullopt;
  return number ? std::optional(Shard{std::move(sharding), *number}) : std::nullopt;
}

PyObject* get_gradient_of_shard(const Shard& shard, PyObject* none) {
  const auto gradient = shard.sharding->shard(shard.number).grad();
  if (!gradient.defined()) return none;
  Py_DECREF(none);
  PyObject* found = THPVariable_Wrap(gradient);
  if (told_of_shards || reader_knows()) return found;
  return tell(found, told_of_shards,
              base::str("the gradient of ", shard.sharding->named(shard.number).name,
                        " was read, which is sharded: it is that of this rank's shard, of one dimension, and a norm of "
                        "it is not that of the whole. model.grad_norm(), model.clip_grad_norm_() and torch's functions "
                        "of these names know all shards, lamina.get_full_gradient(parameter) is the whole gradient. "
                        "This is said once"));
}

int set_gradient_of_shard(const Shard& shard, PyObject* self, PyObject* value, void* closure) {
  const bool clears = value == nullptr || value == Py_None;
  if (!clears && !THPVariable_Check(value)) return gradient.set(self, value, closure);  // torch's error
  {
    const py::gil_scoped_release release;  // another thread may be reducing gradients
    shard.sharding->zero_grad(shard.number, /*set_to_none=*/true);
  }
  if (clears) return 0;
  const auto own = py::reinterpret_steal<py::object>(THPVariable_Wrap(shard.sharding->shard(shard.number)));
  const auto& given = THPVariable_Unpack(value);
  if (given.sizes() != THPVariable_Unpack(self).sizes()) return gradient.set(own.ptr(), value, closure);
  const auto part = py::reinterpret_steal<py::object>(THPVariable_Wrap(shard.sharding->part_of(shard.number, given)));
  return gradient.set(own.ptr(), part.ptr(), closure);
}

// The optimizer in which a tensor stands for a parameter; nullptr where it does not.
std::shared_ptr<distributed_optimizer::Optimizer> stands_in(const at::Tensor& tensor) {
  for (const auto& each : optimizers) {
    if (auto optimizer = each.lock(); optimizer && optimizer->parameters().is_stand_in(tensor)) return optimizer;
  }
  return nullptr;
}

// torch and we see none: norms, scalers and zero_grad() know the parameters, and it may take a copy.
PyObject* get_gradient_of_stand_in(LocalParameters& parameters, const at::Tensor& own, PyObject* none) {
  const auto gradient = parameters.in_step() || reader_knows() ? at::Tensor() : parameters.gradient(own);
  if (!gradient.defined()) return none;
  Py_DECREF(none);
  PyObject* found = THPVariable_Wrap(gradient);
  if (told_of_shards || !parameters.shard(own)) return found;
  return tell(
      found, told_of_shards,
      "the gradient of a part of a parameter was read, which stands in the optimizer's groups: other ranks have "
      "the others, and a norm of it is not that of the whole. Parameters of the model have whole gradients, and "
      "torch's clip_grad_norm_() and get_total_norm() know all parts. This is said once");
}

int set_gradient_of_stand_in(LocalParameters& parameters, PyObject* self, PyObject* value, void* closure) {
  const bool clears = value == nullptr || value == Py_None;
  const bool is_its = parameters.in_step() || (!clears && !THPVariable_Check(value));  // the error is torch's, too
  if (is_its) return gradient.set(self, value, closure);
  if (gradient.set(self, Py_None, closure) != 0) return -1;
  const auto own = THPVariable_Unpack(self);
  const auto given = clears ? at::Tensor() : THPVariable_Unpack(value);
  try {
    const py::gil_scoped_release release;  // another thread may be reducing gradients
    parameters.set_gradient(own, given);
  } catch (const base::UsageError&) {
    set_python_error(std::current_exception());
    return -1;
  }
  return 0;
}

PyObject* get_gradient(PyObject* self, void* closure) {
  PyObject* found = gradient.get(self, closure);
  const auto& parameter = THPVariable_Unpack(self);
  if (found != nullptr && found != Py_None && value::is_slice(parameter) && !reader_knows(kTakeEach)) {
    value::guard_gradient(THPVariable_Unpack(found), parameter);
  }
  if (found != Py_None) return found;
  if (const auto optimizer = stands_in(parameter)) {
    try {
      return get_gradient_of_stand_in(optimizer->parameters(), parameter, found);
    } catch (const base::UsageError&) {
      Py_DECREF(found);
      set_python_error(std::current_exception());
      return nullptr;
    }
  }
  if (const auto shard = shard_of(parameter)) return get_gradient_of_shard(*shard, found);
  if (told || !value::is_released(parameter) || reader_knows()) return found;
  const auto text = base::str(
      "the gradient of a parameter that another rank owns was read, which is None here whatever it is there (",
      value::where_released(parameter),
      "): what is computed of it is a part of the model's. model.grad_norm() and model.clip_grad_norm_() know all of "
      "them, on every rank; model.local_named_parameters() gives those that are here. This is said once");
  return tell(found, told, text);
}

int refuse(const std::string& text) {
  set_python_error(std::make_exception_ptr(base::UsageError(text, base::Code{"model-foreign-parameter"})));
  return -1;
}

int set_gradient(PyObject* self, PyObject* value, void* closure) {
  const bool clears = value == nullptr || value == Py_None;
  const auto& parameter = THPVariable_Unpack(self);
  if (const auto optimizer = stands_in(parameter)) {
    return set_gradient_of_stand_in(optimizer->parameters(), self, value, closure);
  }
  // In its backward it has a whole one for a moment, which hooks may change.
  if (const auto shard = shard_of(parameter); shard && (clears || !parameter.grad().defined())) {
    return set_gradient_of_shard(*shard, self, value, closure);
  }
  if (!value::is_released(parameter) || (clears && !runtime::in_step())) return gradient.set(self, value, closure);
  return refuse(base::str("the gradient of a parameter that another rank owns was set (",
                          value::where_released(parameter),
                          "), which has no effect there: set it after the step on that rank "
                          "(model.local_named_parameters()); optimizer.zero_grad() clears all"));
}

PyObject* get_data(PyObject* self, void* closure) { return data.get(self, closure); }

int set_data(PyObject* self, PyObject* value, void* closure) {
  const auto& parameter = THPVariable_Unpack(self);
  if (!value::is_released(parameter)) {
    int failed = 0;
    value::guard_as_before(parameter, [&] { failed = data.set(self, value, closure); });
    return failed;
  }
  return refuse(base::str("the data of a parameter that another rank owns was set (", value::where_released(parameter),
                          "), which has no effect there: set it on that rank (model.local_named_parameters()), or call "
                          "model.load_state_dict() on all"));
}

void take_place(Attribute& attribute, const py::type& kind) {
  const auto torchs = py::module_::import("torch._C").attr("TensorBase").attr("__dict__")[attribute.ours.name];
  const auto* original = reinterpret_cast<PyGetSetDescrObject*>(torchs.ptr())->d_getset;
  attribute.get = original->get;
  attribute.set = original->set;
  attribute.ours.doc = original->doc;
  attribute.ours.closure = original->closure;
  auto* type = reinterpret_cast<PyTypeObject*>(kind.ptr());
  const auto ours = py::reinterpret_steal<py::object>(PyDescr_NewGetSet(type, &attribute.ours));
  if (!ours) throw py::error_already_set();
  py::setattr(kind, attribute.ours.name, ours);
}

}  // namespace

void bind_parameters(py::module_& module) {
  // From now on `kind`, a class of tensors, tells who reads or sets what of released ones has no meaning here, and has
  // gradients of shards.
  module.def(
      "watch_parameters",
      [](const py::type& kind, const std::shared_ptr<sharding::Sharding>& sharding,
         const std::shared_ptr<distributed_optimizer::Optimizer>& optimizer) {
        told = false;
        if (optimizer) optimizers.emplace_back(optimizer);
        if (sharding) {
          sharded = sharding;
          told_of_shards = false;
        }
        take_place(gradient, kind);
        take_place(data, kind);
      },
      py::arg("kind"), py::arg("sharding") = nullptr, py::arg("optimizer") = nullptr,
      "From now on reading the gradient of a released tensor of that class warns once, unless torch or lamina reads, "
      "and setting its gradient or data is an error. The gradient of a sharded parameter is that of its shard. To "
      "scripts, a tensor that stands for a parameter in the optimizer has its part of the parameter's gradient, which "
      "is told once, too.");
  module.def(
      "forget_parameters",
      [](const py::type& kind) {
        sharded.reset();
        optimizers.clear();
        for (const auto* name : {gradient.ours.name, data.ours.name}) {
          if (kind.attr("__dict__").contains(name)) py::delattr(kind, name);
        }
      },
      py::arg("kind"), "Ends what `watch_parameters` began.");
}

}  // namespace lamina::python
