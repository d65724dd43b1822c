// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/optimizer.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/distributed_optimizer/options.h"
#include "lamina/job_checkpoint/record_job.h"
#include "lamina/session/session.h"
#include "lamina/verification/run_recorder.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"
#include "python/bindings/model.h"
#include "python/bindings/user_optimizer.h"

namespace lamina::python {
namespace {

using data_parallel::Reducer;
using distributed_optimizer::Closure;
using distributed_optimizer::LocalParameters;
using distributed_optimizer::NamedState;
using distributed_optimizer::StateDict;
using ModelOptimizer = distributed_optimizer::Optimizer;
using distributed_optimizer::UpdateTerms;
using optim::DynamicLossScale;
using optim::LossScale;
using pipeline::Backwards;
using session::Session;

// By group, all members: (name, name given, parameter, what stands for it here or None).
py::list members_of(const ModelOptimizer& optimizer, const py::object& lent) {
  const PythonOptimizer user(lent);
  py::list groups;
  for (const auto& group : optimizer.groups().members(user)) {
    py::list members;
    for (const auto& [name, given, parameter, local] : group) {
      members.append(py::make_tuple(name, given, parameter, local.defined() ? py::cast(local) : py::none()));
    }
    groups.append(std::move(members));
  }
  return groups;
}

py::dict to_dict(const LossScale::State& state) {
  return py::dict(py::arg("scale") = state.scale, py::arg("overflows_left") = state.overflows_left,
                  py::arg("steps") = state.steps, py::arg("last_overflow") = state.last_overflow);
}

LossScale::State scale_state(const py::object& saved) {
  return {saved["scale"].cast<double>(), saved["overflows_left"].cast<std::int64_t>(), saved["steps"].cast<long>(),
          saved["last_overflow"].cast<long>()};
}

// (groups of rows, whether it is partial, whose part it is, its parts or None, the loss scale or None); a row is (name,
// name given, state or None, master or None). Python makes its own form of it: python/lamina/optim/state_rows.py.
py::tuple to_rows(const StateDict& dict, const KeptStates& kept) {
  py::list groups;
  for (const auto& group : dict.groups) {
    py::list rows;
    for (const auto& [name, given, state, master] : group) {
      rows.append(py::make_tuple(name, given, kept.give(state), master.defined() ? py::cast(master) : py::none()));
    }
    groups.append(std::move(rows));
  }
  const auto& parts = dict.parts;
  return py::make_tuple(groups, dict.is_partial, py::tuple(py::cast(dict.saved_by)),
                        parts ? py::make_tuple(parts->over, parts->part, parts->count) : py::object(py::none()),
                        dict.scale ? py::object(to_dict(*dict.scale)) : py::none());
}

// The loss scale that a state dict has.
void take_scale(const py::object& saved, StateDict& dict) {
  if (saved.is_none()) return;
  try {
    dict.scale = scale_state(saved);
  } catch (const std::exception& error) {
    dict.no_scale =
        base::str("its loss_scale is ", py::repr(saved).cast<std::string>(), ", which is none (", error.what(), ")");
  }
}

// The way back, of rows (name, state or None, master or None).
StateDict from_rows(const py::tuple& rows, KeptStates& kept) {
  StateDict dict;
  for (const auto& group : rows[0]) {
    auto& own = dict.groups.emplace_back();
    for (const auto& row : group) {
      const auto [name, state, master] = row.cast<std::tuple<std::string, py::object, std::optional<at::Tensor>>>();
      own.push_back({name, "", kept.keep(state), master.value_or(at::Tensor())});
    }
  }
  dict.is_partial = rows[1].cast<bool>();
  dict.saved_by = rows[2].cast<topology::SavedPlace>();
  if (const py::object parts = rows[3]; !parts.is_none()) {
    const auto [over, part, count] = parts.cast<std::tuple<std::string, std::int64_t, std::int64_t>>();
    dict.parts = {over, part, count};
  }
  take_scale(rows[4], dict);
  return dict;
}

py::object whole_state(const ModelOptimizer& optimizer, const py::object& lent, bool to_first) {
  const PythonOptimizer user(lent);
  std::optional<StateDict> dict;
  {
    const Release release;
    dict = optimizer.state_dicts().whole(user, to_first);
  }
  return dict ? py::object(to_rows(*dict, user.kept())) : py::none();
}

py::tuple own_state(const ModelOptimizer& optimizer, const py::object& lent, bool joins_shards) {
  const PythonOptimizer user(lent);
  StateDict dict;
  {
    const Release release;
    dict = optimizer.state_dicts().own(user, joins_shards);
  }
  return to_rows(dict, user.kept());
}

// Has Python load what each member has.
auto giving(const PythonOptimizer& user, const py::function& give) {
  return [&](const std::vector<value::Value>& parts) {
    const Acquire acquire;
    py::list given;
    for (const auto& part : parts) given.append(user.kept().give(part));
    give(given);
  };
}

void load_rows(ModelOptimizer& optimizer, const py::object& lent, const py::tuple& rows, const py::function& give) {
  PythonOptimizer user(lent);
  const auto dict = from_rows(rows, user.kept());
  const Release release;
  optimizer.load(user, dict, giving(user, give));
}

void load_own(ModelOptimizer& optimizer, const py::object& lent, const py::dict& states, const py::function& give) {
  PythonOptimizer user(lent);
  NamedState named;
  for (const auto& [name, state] : states) named.states[name.cast<std::string>()] = user.kept().keep(state);
  const Release release;
  optimizer.load(user, named, /*are_parts=*/true, giving(user, give));
}

void load_plain(ModelOptimizer& optimizer, const py::object& scale, const py::function& load) {
  StateDict dict;
  take_scale(scale, dict);
  optimizer.load_plain(dict, load);
}

bool trim(ModelOptimizer& optimizer, const py::object& lent) {
  PythonOptimizer user(lent);
  const Release release;
  return optimizer.groups().trim(user);
}

// The tables that Python makes go by this.
LocalParameters::Table table_from(const py::function& table) {
  return [table]() -> const model::ParameterTable* {
    const Acquire acquire;
    return table().cast<const model::ParameterTable*>();
  };
}

void step_model(ModelOptimizer& optimizer, const py::object& lent, const Backwards* backwards, Reducer* reducer,
                std::int64_t steps, const py::object& closure) {
  PythonOptimizer user(lent);
  Closure computed;
  if (!closure.is_none()) {
    computed = [&closure] {
      const Acquire acquire;
      closure();
    };
  }
  const Release release;
  optimizer.step(user, {backwards, reducer, steps}, computed);
}

double clip_model(ModelOptimizer& optimizer, const py::object& lent, const Backwards* backwards, Reducer* reducer,
                  std::int64_t steps, double max_norm) {
  PythonOptimizer user(lent);
  const Release release;
  return optimizer.clip(user, {backwards, reducer, steps}, max_norm);
}

void zero_model_grad(ModelOptimizer& optimizer, const py::object& lent, const Backwards* backwards, bool set_to_none) {
  PythonOptimizer user(lent);
  const Release release;
  optimizer.zero_grad(user, {.backwards = backwards}, set_to_none);
}

void bind_local_parameters(py::module_& module) {
  py::class_<LocalParameters>(module, "LocalParameters",
                              "Knows what stands in the groups of an optimizer for parameters of the model; see "
                              "lamina/distributed_optimizer/local_parameters.h.")
      .def(
          "set_model",
          [](LocalParameters& locals, const py::function& table, std::shared_ptr<sharding::Sharding> sharding) {
            locals.set_model(table_from(table), std::move(sharding));
          },
          py::arg("table"), py::arg("sharding").none(true))
      .def("source", &LocalParameters::source, py::arg("local"),
           "The parameter or shard that a member of the groups stands in for, or that itself.")
      .def("is_master", &LocalParameters::is_master, py::arg("local"))
      .def("follow", &LocalParameters::follow, "Gives masters the values of their parameters where those have changed.")
      .def("share_written", &LocalParameters::share_written, py::call_guard<Release>(),
           "Gives parameters on all ranks what a program has written to their parts; collective over those who hold "
           "them where there is something.")
      .def_property_readonly("in_step", &LocalParameters::in_step, "True while an update is under way.")
      .def_property_readonly(
          "divided_over",
          [](const LocalParameters& locals) {
            const auto group = locals.divided_over();
            return group ? std::optional(kind_of(*group)) : std::nullopt;
          },
          "The group of those who hold parts of the same parameters, where anything is divided.");
}

void bind_update_terms(py::module_& module) {
  py::class_<UpdateTerms>(module, "UpdateTerms", "An update's.")
      .def_readonly("factor", &UpdateTerms::factor, "The number that gradients are still to be multiplied by.")
      .def_readonly("norm", &UpdateTerms::norm, "The norm of all of them then; 0 where nobody has measured it.")
      .def_readonly("parameters", &UpdateTerms::parameters, "None where all members of the groups are parameters.")
      .def_property_readonly("has_closure", [](const UpdateTerms& terms) { return terms.closure != nullptr; })
      .def("close", [](const UpdateTerms& terms) { terms.closure(); }, py::call_guard<Release>(), "Calls the closure.");
}

py::object part_of_state(const ModelOptimizer& optimizer, const py::object& lent, const at::Tensor& local,
                         const at::Tensor& parameter, const py::object& state) {
  const PythonOptimizer user(lent);
  const auto part = optimizer.groups().part_of_state(user, local, parameter, user.kept().keep(state));
  return user.kept().give(part);
}

std::shared_ptr<ModelOptimizer> recorded_optimizer(const std::shared_ptr<Session>& session,
                                                   std::shared_ptr<LossScale> scale, std::int64_t number,
                                                   bool clips_by_default) {
  auto made =
      std::make_shared<ModelOptimizer>(session->ranks(), session->config(), std::move(scale), number, clips_by_default);
  if (session->clips_as_shards()) made->clip_as_shards();
  if (const auto& recorder = session->run_recorder()) {
    job_checkpoint::record_updates(*made, session->ranks(), recorder);
  }
  return made;
}

void bind_states(py::class_<ModelOptimizer, std::shared_ptr<ModelOptimizer>>& kind) {
  kind.def("part_of_state", &part_of_state, py::arg("user"), py::arg("local"), py::arg("parameter"), py::arg("state"))
      .def(
          "state_is_plain",
          [](const ModelOptimizer& optimizer, const py::object& lent) {
            return optimizer.state_dicts().is_plain(PythonOptimizer(lent));
          },
          py::arg("user"), "True where the state dict of the user's optimizer is the whole one.")
      .def("whole_state", &whole_state, py::arg("user"), py::arg("to_first"),
           "The whole state dict, as rows; with `to_first` None on all ranks but the first. Here and below see "
           "lamina/distributed_optimizer/state_dicts.h.")
      .def("own_state", &own_state, py::arg("user"), py::arg("joins_shards"), "This rank's.")
      .def(
          "waits",
          [](const ModelOptimizer& optimizer, const py::tuple& rows) {
            KeptStates kept;
            return optimizer.state_dicts().waits(from_rows(rows, kept));
          },
          py::arg("rows"), "True of a state dict that is to be loaded when the model is cut.")
      .def(
          "require_fits",
          [](const ModelOptimizer& optimizer, const py::object& lent, const py::tuple& rows) {
            const PythonOptimizer user(lent);
            optimizer.state_dicts().require_fits(user, from_rows(rows, user.kept()));
          },
          py::arg("user"), py::arg("rows"), "UsageError for one that will not fit then, as far as this rank knows.")
      .def("load", &load_rows, py::arg("user"), py::arg("rows"), py::arg("give"),
           "Loads a state dict, by `give`, a function of the states of the members that are here.")
      .def("load_own", &load_own, py::arg("user"), py::arg("states"), py::arg("give"),
           "Loads what this rank has of a state, by the names of parameters.")
      .def("load_plain", &load_plain, py::arg("scale").none(true), py::arg("load"),
           "Loads a state dict of a plain optimizer, by `load`, with the loss scale that it has.");
}

void bind_model_optimizer(py::module_& module) {
  py::class_<ModelOptimizer, std::shared_ptr<ModelOptimizer>> kind(
      module, "Optimizer",
      "Everything around the updates of an optimizer of the job's model; see lamina/distributed_optimizer/optimizer.h. "
      "`number`: how many optimizers the job had before.");
  bind_states(kind);
  kind.def(py::init(&recorded_optimizer), py::arg("session"), py::arg("scale"), py::arg("number"),
           py::arg("clips_by_default"), py::keep_alive<1, 2>())
      .def_property_readonly("parameters", py::overload_cast<>(&ModelOptimizer::parameters),
                             py::return_value_policy::reference_internal)
      .def("members", &members_of, py::arg("user"),
           "By group, all members as far as this rank knows them: the name, the name it was given with, the parameter, "
           "and what stands for it here, None where another rank updates it.")
      .def("trim", &trim, py::arg("user"),
           "Makes groups this rank's part. True where there are new members that are not the model's, with which it is "
           "collective over the world.")
      .def(
          "are_cut",
          [](const ModelOptimizer& optimizer, const py::object& lent) {
            return optimizer.groups().are_cut(PythonOptimizer(lent));
          },
          py::arg("user"), "False where a script has put members into groups since they were cut, or groups came.")
      .def(
          "are_whole",
          [](const ModelOptimizer& optimizer, const py::object& lent) {
            return optimizer.groups().are_whole(PythonOptimizer(lent));
          },
          py::arg("user"), "True where no member has left, and none is another tensor than the model's.")
      .def_property_readonly(
          "holds_others", [](const ModelOptimizer& optimizer) { return optimizer.groups().hold_others(); },
          "True where other tensors than the model's stand here, whether the job goes on or not.")
      .def(
          "parameter_of",
          [](const ModelOptimizer& optimizer, const at::Tensor& local) {
            return optimizer.groups().parameter_of(local);
          },
          py::arg("local"), "The parameter of the model that a tensor is, or stands for.")
      .def_property_readonly(
          "beside", [](const ModelOptimizer& optimizer) { return optimizer.beside().all(); },
          "The parameters that are not the model's.")
      .def("step", &step_model, py::arg("user"), py::arg("backwards").none(true), py::arg("reducer").none(true),
           py::arg("steps"), py::arg("closure").none(true),
           "`backwards`, `reducer`, `steps`: of the model, which has made so many.")
      .def("clip", &clip_model, py::arg("user"), py::arg("backwards").none(true), py::arg("reducer").none(true),
           py::arg("steps"), py::arg("max_norm"),
           "The norm of all gradients, which the next step clips; -1 where they overflow.")
      .def("zero_grad", &zero_model_grad, py::arg("user"), py::arg("backwards").none(true), py::arg("set_to_none"))
      .def("follow", &ModelOptimizer::follow, "Gives masters the values of their parameters where those have changed.")
      .def_property_readonly("overflow", &ModelOptimizer::overflow,
                             "True where gradients did so in the last step, which was left out.")
      .def_property_readonly(
          "norm", &ModelOptimizer::norm,
          "The norm that the last step measured, without the loss scale and before clipping; 0 where it did not.");
}

}  // namespace

void bind_loss_scale(py::module_& module) {
  py::class_<LossScale, std::shared_ptr<LossScale>>(
      module, "LossScale", "Multiplies losses; see lamina/optim/loss_scale.h. `LossScale(scale)` stays as it is.")
      .def(py::init<double>(), py::arg("scale"))
      .def(py::init([](double init_scale, double scale_factor, std::int64_t scale_window, double min_scale,
                       std::int64_t delayed_shift, bool consecutive_hysteresis) {
             return std::make_shared<LossScale>(DynamicLossScale{init_scale, scale_factor, scale_window, min_scale,
                                                                 delayed_shift, consecutive_hysteresis});
           }),
           py::kw_only(), py::arg("init_scale") = DynamicLossScale().init_scale,
           py::arg("scale_factor") = DynamicLossScale().scale_factor,
           py::arg("scale_window") = DynamicLossScale().scale_window,
           py::arg("min_scale") = DynamicLossScale().min_scale,
           py::arg("delayed_shift") = DynamicLossScale().delayed_shift,
           py::arg("consecutive_hysteresis") = DynamicLossScale().consecutive_hysteresis)
      .def_property_readonly("value", &LossScale::value)
      .def_property_readonly("is_dynamic", &LossScale::is_dynamic)
      .def_property_readonly("is_on", &LossScale::is_on)
      .def("update", &LossScale::update, py::arg("overflow"))
      .def_property(
          "state", [](const LossScale& scale) { return to_dict(scale.state()); },
          [](LossScale& scale, const py::dict& saved) { scale.set_state(scale_state(saved)); });
}

void bind_optimizer(py::module_& module) {
  bind_local_parameters(module);
  bind_update_terms(module);
  bind_model_optimizer(module);
  module.def(
      "require_same_options",
      [](const std::shared_ptr<Session>& session, const std::string& options, bool with_copies) {
        const Release release;
        const auto ranks = session->ranks();
        distributed_optimizer::require_alike(
            options, distributed_optimizer::trained_with(ranks, session->config(), with_copies), ranks);
      },
      py::arg("session"), py::arg("options"), py::arg("with_copies"),
      "UsageError, on all, where options differ between ranks that train one model; collective over these.");
}

}  // namespace lamina::python
