// SPDX-License-Identifier: Apache-2.0
// Modules and parameters that ranks own and others use: python/lamina/remote.
#include "lamina/parameter_server/service.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/optim/step.h"
#include "lamina/session/session.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"
#include "python/bindings/hooks.h"

namespace lamina::python {
namespace {

using parameter_server::Address;
using parameter_server::AutogradContext;
using parameter_server::Optimizer;
using parameter_server::Parameters;
using parameter_server::RemoteOptimizer;
using parameter_server::Service;
using parameter_server::Updater;
using session::Session;
using AddressRow = std::tuple<int, std::int64_t, std::int64_t>;  // owner, job, number

Address to_address(const AddressRow& row) { return {base::Rank(std::get<0>(row)), std::get<1>(row), std::get<2>(row)}; }

AddressRow to_row(const Address& address) {
  return {static_cast<int>(address.owner.value), address.job, address.number};
}

// An object of Python that any thread may let go of.
std::shared_ptr<py::object> shared(py::object object) {
  const auto destroy = [](py::object* held) {
    const py::gil_scoped_acquire gil;
    delete held;
  };
  return {new py::object(std::move(object)), destroy};
}

std::vector<std::optional<at::Tensor>> optional(std::span<const at::Tensor> tensors) {
  std::vector<std::optional<at::Tensor>> found;
  for (const auto& tensor : tensors) {
    found.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return found;
}

// A gradient that the rule may write to: it may have memory in common with others, or be expanded.
std::vector<at::Tensor> own_copies(std::span<const at::Tensor> gradients) {
  std::vector<at::Tensor> copies;
  for (const auto& gradient : gradients) copies.push_back(gradient.defined() ? gradient.clone() : gradient);
  return copies;
}

// A rule of Python's, under the GIL: a function of the list of gradients, and of hyper-parameters by name, or None.
class PythonUpdater : public Updater {
 public:
  explicit PythonUpdater(py::object function) : function_(shared(std::move(function))) {}

  void update(Indices, std::span<const at::Tensor>, std::span<const at::Tensor> gradients,
              const parameter_server::StepOptions& options) override {
    const auto copies = own_copies(gradients);
    const py::gil_scoped_acquire gil;
    (*function_)(optional(copies), to_object(options.hyper));
  }

 private:
  const std::shared_ptr<py::object> function_;
};

// Hyper-parameters of an object of TorchScript, which has them as attributes or as numbers in a dictionary `defaults`,
// for as long as it lives.
class ScriptOptions {
 public:
  // `given`: a dictionary, or None for none.
  ScriptOptions(c10::intrusive_ptr<c10::ivalue::Object> form, const value::Value& given) : form_(std::move(form)) {
    if (given.get_if<value::None>() != nullptr) return;
    const auto& items = given.as<value::Dict>().items;
    for (const auto& [name, value] : items) {
      if (!has_attribute(name.as<std::string>()) && !in_defaults(name.as<std::string>())) {
        throw base::UsageError(base::str("set_options(): ", form_->type()->name()->name(), " has no attribute ",
                                         name.as<std::string>(), ", and none in a dictionary `defaults`"));
      }
    }
    for (const auto& [name, value] : items) set(name.as<std::string>(), to_ivalue(value));
  }
  ScriptOptions(const ScriptOptions&) = delete;
  ScriptOptions& operator=(const ScriptOptions&) = delete;
  ~ScriptOptions() {
    while (!before_.empty()) {
      auto [name, value] = std::move(before_.back());
      before_.pop_back();
      put(name, std::move(value));
    }
  }

 private:
  static c10::IValue to_ivalue(const value::Value& value) {
    if (const auto* flag = value.get_if<bool>()) return *flag;
    if (const auto* whole = value.get_if<std::int64_t>()) return static_cast<double>(*whole);
    return value.as<double>();
  }
  bool has_attribute(const std::string& name) const { return form_->type()->findAttributeSlot(name).has_value(); }
  c10::Dict<c10::IValue, c10::IValue> defaults() const { return form_->getAttr("defaults").toGenericDict(); }
  bool in_defaults(const std::string& name) const { return has_attribute("defaults") && defaults().contains(name); }

  void set(const std::string& name, c10::IValue value) {
    before_.emplace_back(name, has_attribute(name) ? form_->getAttr(name) : defaults().at(name));
    put(name, std::move(value));
  }
  void put(const std::string& name, c10::IValue value) {
    if (has_attribute(name)) {
      form_->setAttr(name, std::move(value));
    } else {
      defaults().insert_or_assign(name, std::move(value));
    }
  }

  const c10::intrusive_ptr<c10::ivalue::Object> form_;
  std::vector<std::pair<std::string, c10::IValue>> before_;
};

// A rule of TorchScript's, without the GIL: a module with `step(gradients: List[Optional[Tensor]])`, whose attribute
// `optim` has the hyper-parameters.
class ScriptUpdater : public Updater {
 public:
  explicit ScriptUpdater(torch::jit::Module module) : module_(std::move(module)) {}

  void update(Indices, std::span<const at::Tensor>, std::span<const at::Tensor> gradients,
              const parameter_server::StepOptions& options) override {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& copy : own_copies(gradients)) {
      list.push_back(copy.defined() ? std::optional(copy) : std::nullopt);
    }
    const std::lock_guard guard(mutex_);  // its states are in one dictionary
    const ScriptOptions others(module_.attr("optim").toObject(), options.hyper);
    module_.get_method("step")({list});
  }

 private:
  std::mutex mutex_;
  torch::jit::Module module_;
};

// The parameters of this process that are no part of a job: those behind torch's RRefs.
Parameters& parameters_of_process() {
  static auto& parameters = *new Parameters();
  return parameters;
}

std::unique_ptr<Optimizer> make_local_optimizer(const std::vector<at::Tensor>& parameters,
                                                std::shared_ptr<Updater> updater) {
  std::vector<std::shared_ptr<parameter_server::Parameter>> mine;
  for (const auto& parameter : parameters) mine.push_back(parameters_of_process().of(parameter));
  return std::make_unique<Optimizer>(std::move(mine), std::move(updater));
}

void step_local(Optimizer& optimizer, const std::vector<std::optional<at::Tensor>>& gradients,
                const py::object& hyper) {
  std::vector<at::Tensor> given;
  for (const auto& gradient : gradients) given.push_back(gradient.value_or(at::Tensor()));
  const parameter_server::StepOptions options{.hyper = to_value(hyper)};
  const Release release;
  optimizer.step(given, options);
}

// In a job.

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

py::object place(Session& session, const std::string& name, py::object function, NamedTensors parameters) {
  const auto held = shared(std::move(function));
  const auto call = [held](value::Value arguments) {
    const py::gil_scoped_acquire gil;
    const py::object given = to_object(arguments);
    arguments = {};  // the function alone holds them now
    return to_value((*held)(*given.cast<py::tuple>()));
  };
  parameter_server::RemoteModule placed;
  {
    const Release release;
    placed = session.parameter_server().place({name, call, std::move(parameters)});
  }
  return to_object(to_value(placed));
}

py::object find(Session& session, int owner, const std::string& name) {
  parameter_server::RemoteModule found;
  {
    const Release release;
    found = session.parameter_server().trainer().find(base::Rank(owner), name, session.patience());
  }
  return to_object(to_value(found));
}

py::object call(Session& session, const AddressRow& module, const std::string& label, const py::tuple& arguments) {
  auto value = to_value(arguments);
  {
    const Release release;
    value = session.parameter_server().trainer().call(to_address(module), label, std::move(value), session.patience());
  }
  return to_object(value);
}

RemoteOptimizer make_optimizer(Session& session, const std::string& functional, const std::vector<double>& hyper,
                               const std::vector<AddressRow>& parameters) {
  std::vector<Address> addresses;
  for (const auto& row : parameters) addresses.push_back(to_address(row));
  return session.parameter_server().trainer().make_optimizer(functional, hyper, addresses, session.patience());
}

void backward(Session& session, AutogradContext& context, const std::vector<at::Tensor>& tensors,
              const std::vector<std::optional<at::Tensor>>& given, bool keep_graph) {
  std::vector<at::Tensor> gradients;
  for (const auto& gradient : given) gradients.push_back(gradient.value_or(at::Tensor()));
  session.parameter_server().trainer().backward(context, tensors, gradients, keep_graph, session.patience());
}

void bind_updaters(py::module_& module) {
  py::class_<Updater, std::shared_ptr<Updater>>(
      module, "Updater", "The rule of an optimizer, with its states: lamina/parameter_server/optimizer.h.");
  module.def(
      "functional_updater",
      [](std::shared_ptr<optim::Functional> functional, std::vector<double> hyper, std::size_t parameters) {
        return parameter_server::make_functional_updater(std::move(functional), std::move(hyper), parameters,
                                                         optim::shared_threads());
      },
      py::arg("functional"), py::arg("hyper"), py::arg("parameters"), "One of the engine's, for so many parameters.");
  module.def(
      "python_updater",
      [](py::object function) -> std::shared_ptr<Updater> {
        return std::make_shared<PythonUpdater>(std::move(function));
      },
      py::arg("function"), "A function of the gradients, which holds the GIL.");
  module.def(
      "script_updater",
      [](const py::object& script) -> std::shared_ptr<Updater> {
        return std::make_shared<ScriptUpdater>(script.attr("_c").cast<torch::jit::Module>());
      },
      py::arg("module"), "A module of TorchScript with `step(gradients)`, which does not hold the GIL.");
  module.def(
      "writable", [](const at::Tensor& parameter) { return parameters_of_process().of(parameter)->writable(); },
      py::arg("parameter"),
      "A tensor that a LocalOptimizer writes to: it shares the parameter's memory, and counts writes by itself.");
}

void bind_optimizers(py::module_& module) {
  py::class_<Optimizer>(module, "LocalOptimizer",
                        "An optimizer of parameters of this process that are no part of a job. From any thread.")
      .def(py::init(&make_local_optimizer), py::arg("parameters"), py::arg("updater"))
      .def("step", &step_local, py::arg("gradients"), py::arg("hyper") = py::none(),
           "Updates those that have a gradient, with hyper-parameters as its updater takes them. Releases the GIL.");
  py::class_<RemoteOptimizer>(module, "RemoteOptimizer",
                              "An optimizer of parameters on several ranks: its part on each owner.")
      .def(py::init([](const std::vector<AddressRow>& parts, bool needs_norm) {
             RemoteOptimizer optimizer{{}, needs_norm};
             for (const auto& part : parts) optimizer.parts.push_back(to_address(part));
             return optimizer;
           }),
           py::arg("parts"), py::arg("needs_norm") = false)
      .def_property_readonly("parts",
                             [](const RemoteOptimizer& optimizer) {
                               std::vector<AddressRow> rows;
                               for (const auto& part : optimizer.parts) rows.push_back(to_row(part));
                               return rows;
                             })
      .def_readonly("needs_norm", &RemoteOptimizer::needs_norm)
      .def_property(
          "hyper", [](const RemoteOptimizer& optimizer) { return to_object(optimizer.hyper); },
          [](RemoteOptimizer& optimizer, const py::object& hyper) { optimizer.hyper = to_value(hyper); });
}

}  // namespace

void bind_parameter_server(py::module_& module) {
  bind_updaters(module);
  bind_optimizers(module);
  py::class_<AutogradContext, std::shared_ptr<AutogradContext>>(
      module, "RemoteContext", "See [Note: contexts] in lamina/parameter_server/protocol.h.")
      .def_property_readonly("origin", [](const AutogradContext& context) { return context.id.origin.value; })
      .def_property_readonly("number", [](const AutogradContext& context) { return context.id.number; })
      .def_property_readonly("ended", &AutogradContext::ended)
      .def(
          "gradients",
          [](AutogradContext& context) {
            auto all = context.all_gradients();
            return std::pair(std::move(all.leaves), std::move(all.gradients));
          },
          "The leaves here that have one, and theirs.");

  py::class_<Service>(module, "ParameterServer", "This rank's end of what ranks own and others use.")
      .def_property_readonly("contexts", &Service::contexts)
      .def_property_readonly("modules", [](Service& service) { return service.owned().modules(); })
      .def_property_readonly("optimizers", [](Service& service) { return service.owned().optimizers(); })
      .def(
          "add_optimizer",
          [](Service& service, const std::vector<std::int64_t>& parameters, std::shared_ptr<Updater> updater) {
            return service.owned().add_optimizer(parameters, std::move(updater));
          },
          py::arg("parameters"), py::arg("updater"))
      .def(
          "writable",
          [](Service& service, std::int64_t number) { return service.owned().parameter(number)->writable(); },
          py::arg("parameter"))
      .def("begin_context", &Service::begin_context)
      .def("end_context", &Service::end_context, py::arg("context"), py::call_guard<Release>());
  py::reinterpret_borrow<py::class_<Session, std::shared_ptr<Session>>>(module.attr("Session"))
      .def_property_readonly("parameter_server", &Session::parameter_server,
                             py::return_value_policy::reference_internal)
      .def("place", &place, py::arg("name"), py::arg("function"), py::arg("parameters"))
      .def("find", &find, py::arg("owner"), py::arg("name"))
      .def("call_placed", &call, py::arg("module"), py::arg("label"), py::arg("arguments"))
      .def("make_remote_optimizer", &make_optimizer, py::arg("functional"), py::arg("hyper"), py::arg("parameters"),
           py::call_guard<Release>())
      .def(
          "share_remote",
          [](Session& session, bool module, const AddressRow& address) {
            const auto what = module ? parameter_server::Shared::kModule : parameter_server::Shared::kOptimizer;
            session.parameter_server().trainer().share(what, to_address(address), session.patience());
          },
          py::arg("module"), py::arg("address"), py::call_guard<Release>(),
          "Says to the owner of a module, or of an optimizer, that other ranks than its maker will name it.")
      .def(
          "serve", [](Session& session) { session.parameter_server().serve(session.patience()); },
          py::call_guard<Release>())
      .def("remote_backward", &backward, py::arg("context"), py::arg("tensors"), py::arg("gradients"),
           py::arg("keep_graph"), py::call_guard<Release>())
      .def(
          "remote_step",
          [](Session& session, AutogradContext& context, const RemoteOptimizer& optimizer) {
            session.parameter_server().trainer().step(context, optimizer, session.patience());
          },
          py::arg("context"), py::arg("optimizer"), py::call_guard<Release>());
}

}  // namespace lamina::python
