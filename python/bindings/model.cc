// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/model.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "bindings.h"
#include "lamina/model/cut.h"
#include "lamina/model/make_table.h"
#include "lamina/model/norm.h"
#include "lamina/model/values.h"
#include "lamina/session/model_life.h"
#include "lamina/session/sharding.h"
#include "lamina/session/slicing.h"
#include "lamina/tensor_parallel/team.h"
#include "lamina/value/released.h"
#include "lamina/verification/run_recorder.h"
#include "python/bindings/convert.h"
#include "python/bindings/hooks.h"
#include "python/bindings/plan.h"

namespace lamina::python {
namespace {

using model::ParameterTable;
using session::Session;
using topology::Group;

model::Plan plan_model(const Session& session, const model::ModuleTree& tree, const py::object& measures,
                       const plan::KeptPartition& kept, const config::Config* changed) {
  const auto& config = changed == nullptr ? session.config() : *changed;
  return model::plan_model(tree, to_costs(measures), config, session.world().size, config.partitions, kept);
}

std::vector<int> hooked_modules(Session& session, const std::vector<std::string>& names) {
  auto& hooks = session.job().call_hooks();
  hooks.number(names);
  std::vector<int> hooked;
  for (int module = 0; module < static_cast<int>(names.size()); ++module) {
    if (hooks.has(base::ModuleId(module))) hooked.push_back(module);
  }
  return hooked;
}

// `shown`: only hooks that are shown tensors hear of it, or only all others.
std::unique_ptr<BegunCall> begin_call(Session& session, int module, bool remote, const std::vector<at::Tensor>& inputs,
                                      std::optional<bool> shown) {
  const auto& hooks = session.job().call_hooks();
  const base::ModuleId id(module);
  return std::make_unique<BegunCall>(shown ? hooks.begin_for(*shown, id, remote, inputs)
                                           : hooks.begin(id, remote, inputs));
}

// Name, value, tensors in it, and a module that uses it, too.
using ReadVariable = std::tuple<std::string, std::string, std::vector<at::Tensor>, std::string>;

bool is_recorded(Session& session) { return session.run_recorder() && session.run_recorder()->writes(); }

void bind_recorded_run(py::class_<Session, std::shared_ptr<Session>>& session) {
  session
      .def_property_readonly("is_recorded", &is_recorded,
                             "True where this run is recorded, to be compared with another.")
      .def_property_readonly(
          "is_collapsed", [](Session& self) { return self.run_recorder() && self.run_recorder()->is_collapsed(); },
          "True in a run without the script's layout, to which another is compared.")
      .def_property_readonly(
          "looked_at",
          [](Session& self) {
            return self.run_recorder() ? self.run_recorder()->looked_at() : std::set<std::string>();
          },
          "The module of which it is recorded what its calls read.")
      .def(
          "record_reads",
          [](Session& self, const std::string& module, const std::vector<ReadVariable>& variables) {
            std::vector<verification::RunRecorder::Variable> read;
            for (const auto& [name, value, tensors, user] : variables) read.push_back({name, value, tensors, user});
            self.run_recorder()->see_reads(module, read);
          },
          py::arg("module"), py::arg("variables"),
          "Records what the call of this module that has begun last reads: name, value, tensors in it, and what "
          "another module does with it.");
}

// The parts of a state that ranks of this pipeline own as one. They come rank by rank, or in the order of the plain
// model's where its cut is given. Where they go `to_first`, the other ranks get nothing.
py::dict gather_state(Session& session, const py::dict& own, bool to_first, const model::Cut* cut) {
  std::vector<model::NamedValue> parts;
  for (const auto& [name, part] : own) parts.emplace_back(name.cast<std::string>(), to_value(part));
  {
    const Release release;
    parts = model::gather(std::move(parts), to_first, session.members(topology::kPartitions), session.mailbox(),
                          session.patience());
    if (cut != nullptr) {
      std::ranges::stable_sort(parts, {}, [&](const model::NamedValue& each) { return cut->position_of(each.first); });
    }
  }
  py::dict state;
  for (const auto& [name, part] : parts) state[py::str(name)] = to_object(part);
  return state;
}

// (name, tensor, is a buffer, how it is sliced)
using ParameterRow = std::tuple<std::string, at::Tensor, bool, std::optional<PythonSlicing>>;

ParameterTable make_table(Session& session, const model::Cut& cut, const std::vector<ParameterRow>& rows) {
  std::vector<model::NamedTensor> tensors;
  for (const auto& [name, tensor, buffer, slicing] : rows) {
    tensors.push_back({name, tensor, buffer, {}});
    if (slicing) tensors.back().slicing = to_slicing(session, *slicing);
  }
  const auto& topology = session.topology();
  const model::Slice slice{topology.index(Group::kTp, session.world().rank), topology.size(Group::kTp)};
  return model::make_table(topology, session.config(), cut, tensors, slice);
}

// The text of an error of using a tensor on this rank whose value is in `partition`.
std::string why_released(const Session& session, const std::string& name, base::Partition partition) {
  return base::str(name, " lives in partition ", partition, " on rank ", session.owner(partition),
                   "; it was used on rank ", session.world().rank,
                   ": use it only inside the forward of its own module, or place its user in the same partition with "
                   "set_partition. What concerns all parameters, such as an average, a penalty or a save, is done "
                   "between steps by the DistributedModel, and not by the module that it wraps: its "
                   "local_named_parameters() has those that are here, its state_dict() all values on every rank");
}

auto why_released(const Session& session) {
  return
      [&session](const model::Parameter& row) { return why_released(session, row.layout.name, row.layout.partition); };
}

// Python's face of a model: ModelFace in python/lamina/pipeline/model_face.py.
class PythonModel : public session::ModelFace {
 public:
  // They outlive it.
  PythonModel(const Session& session, py::handle lent) : session_(session), lent_(lent) {}

  std::vector<messaging::Argument> arguments() const override {
    const Acquire acquire;
    std::vector<messaging::Argument> all;
    for (auto& [name, value] : lent_.attr("arguments").cast<std::vector<std::pair<std::string, std::string>>>()) {
      all.push_back({std::move(name), std::move(value)});
    }
    return all;
  }
  model::Proposal propose() override {
    const Acquire acquire;
    py::object plan, word;
    model::Proposal proposal;
    std::tie(tree_, plan, proposal.error, word) =
        lent_.attr("propose")().cast<std::tuple<py::object, py::object, std::string, py::object>>();
    proposal.word = to_value(word);
    if (!plan.is_none()) proposal.plan = plan.cast<const model::Plan&>();
    return proposal;
  }
  const model::ModuleTree& tree() const override {
    const Acquire acquire;
    return tree_.cast<const model::ModuleTree&>();
  }
  void take_cut(const model::Agreed& agreed) override {
    const Acquire acquire;
    lent_.attr("take_cut")(agreed.cut, agreed.table, to_object(agreed.word));
  }
  const ParameterTable& table() override {
    const Acquire acquire;
    return *lent_.attr("table").cast<const ParameterTable*>();
  }
  bool values_follow() const override {
    const Acquire acquire;
    return lent_.attr("values_follow").cast<bool>();
  }
  model::ValueHooks value_hooks() override {
    const auto make = [this](std::span<const model::Parameter> rows) {
      const Acquire acquire;
      py::list tensors;
      for (const auto& row : rows) tensors.append(py::cast(row.tensor));
      lent_.attr("make_values")(tensors);
    };
    return {make, why_released(session_)};
  }
  std::size_t portion_bytes() const override {
    const Acquire acquire;
    return lent_.attr("portion_bytes").cast<std::size_t>();
  }
  void take_values(std::shared_ptr<sharding::Sharding> sharding) override {
    const Acquire acquire;
    lent_.attr("take_values")(std::move(sharding));
  }
  void trim_optimizers() override { call("trim_optimizers"); }
  void watch() override { call("watch"); }
  void route() override { call("route"); }
  void load() override { call("load"); }
  void settle() override { call("settle"); }

 private:
  void call(const char* method) {
    const Acquire acquire;
    lent_.attr(method)();
  }

  const Session& session_;
  py::handle lent_;
  py::object tree_;
};

void begin_life(Session& session, const py::object& lent) {
  PythonModel face(session, lent);
  const Release release;
  session::begin_life(session, face);
}

void release_tensor(Session& session, at::Tensor tensor, const std::string& name, int partition,
                    const std::optional<at::Tensor>& like) {
  value::release(tensor, why_released(session, name, base::Partition(partition)), like.value_or(at::Tensor()));
}

std::vector<at::Tensor> norms(Session& session, const ParameterTable& table,
                              const std::vector<std::pair<at::Tensor, std::optional<at::Tensor>>>& given,
                              double norm_type) {
  std::vector<model::Measured> measured;
  for (const auto& [of, tensor] : given) measured.emplace_back(of, tensor.value_or(at::Tensor()));
  const Release release;
  return model::norms(table, measured, norm_type, session.members(topology::kOneCopy), session.mailbox(),
                      session.patience());
}

}  // namespace

// The axes first, by which groups are named; then their meanings: see [Note: groups by meaning].
constexpr std::pair<std::string_view, Group> kGroups[] = {{"world", Group::kWorld},
                                                          {"mp", Group::kMp},
                                                          {"dp", Group::kDp},
                                                          {"pp", Group::kPp},
                                                          {"tp", Group::kTp},
                                                          {"rdp", Group::kRdp},
                                                          {"shard", Group::kShard},
                                                          {"shard_copies", Group::kShardCopies},
                                                          {"shard_within", Group::kShardWithin},
                                                          {"shard_across", Group::kShardAcross},
                                                          {"node", Group::kNode},
                                                          {"one_copy", topology::kOneCopy},
                                                          {"partitions", topology::kPartitions},
                                                          {"replicas", topology::kReplicas},
                                                          {"same_parts", topology::kSameParts}};

Group group_of(const std::string& kind) {
  for (const auto& [name, group] : kGroups) {
    if (name == kind) return group;
  }
  throw base::UsageError(base::str("\"", kind, "\" is no kind of group"));
}

layout::Slicing to_slicing(const Session& session, const PythonSlicing& given) {
  layout::Slicing slicing{given.first, {}, session.topology().size(Group::kTp)};
  for (const auto& [extent, unit] : given.second) slicing.sections.push_back({extent, unit});
  return slicing;
}

std::string kind_of(Group group) {
  return std::string(std::ranges::find(kGroups, group, [](const auto& each) { return each.second; })->first);
}

static void bind_parameter_table(py::module_& module) {
  module.def("is_odd", &model::is_odd, py::arg("buffer"),
             "True of a buffer without a memory of plain elements, sparse or quantised: all ranks keep it.");
  py::class_<ParameterTable>(
      module, "ParameterTable",
      "The table of who holds what of the model: see [Note: parameter table] in lamina/model/parameter_table.h.")
      .def(py::init(&make_table), py::arg("session"), py::arg("cut"), py::arg("rows"),
           "A row for each tensor: its name, it, whether it is a buffer, how it is sliced. Parameters come first.")
      .def("is_here", py::overload_cast<const at::Tensor&>(&ParameterTable::is_here, py::const_), py::arg("tensor"),
           "True where this rank has elements of a tensor; for one that is not the model's, too.")
      .def(
          "has_any",
          [](const ParameterTable& table, const std::vector<at::Tensor>& tensors) {
            return std::ranges::any_of(table.find_with_gradients(tensors),
                                       [](const auto* row) { return row != nullptr; });
          },
          py::arg("tensors"), "True where one of them is the model's, or the gradient of a parameter of the model's.")
      .def(
          "reduced_over",
          [](const ParameterTable& table, const at::Tensor& parameter) -> std::optional<std::string> {
            const auto* row = table.find(parameter);
            if (row == nullptr) return {};
            return row->reduction.over == topology::kSameParts ? "rdp" : "dp";
          },
          py::arg("parameter"), "The group over which its gradients are reduced; None for what is not the model's.")
      .def_property_readonly("whole_everywhere", &ParameterTable::whole_everywhere,
                             "True where each rank has all of the model.");
}

// (name, parameter, how it is to be sliced)
using Unsliced = std::tuple<std::string, at::Tensor, PythonSlicing>;

void slice(Session& session, const std::vector<Unsliced>& given, const py::function& make) {
  std::vector<session::ToSlice> parameters;
  for (const auto& [name, tensor, slicing] : given) parameters.push_back({name, tensor, to_slicing(session, slicing)});
  const auto make_here = [&](std::span<const at::Tensor> tensors) {
    const Acquire acquire;
    make(std::vector<at::Tensor>(tensors.begin(), tensors.end()));
  };
  const Release release;
  session::slice(session, parameters, make_here);
}

using PythonTwice = std::tuple<std::optional<at::Tensor>, std::optional<at::Tensor>, double>;
using PythonCompared = std::tuple<std::string, std::int64_t, std::vector<std::int64_t>>;

std::vector<PythonCompared> compare_slices(Session& session, const std::vector<PythonTwice>& given, double tolerance) {
  const Release release;
  std::vector<tensor_parallel::Twice> values;
  for (const auto& [whole, own, floor] : given) {
    values.push_back({whole.value_or(at::Tensor()), own.value_or(at::Tensor()), floor});
  }
  constexpr const char* kWords[] = {"alike", "part", "scattered", "terms", "zero", "another"};
  std::vector<PythonCompared> found;
  for (auto& each : session::compare_slices(session, values, tolerance)) {
    found.emplace_back(kWords[static_cast<int>(each.verdict)], each.dim, std::move(each.sizes));
  }
  return found;
}

void bind_slices(py::class_<Session, std::shared_ptr<Session>>& session) {
  session.def("slice", &slice, py::arg("parameters"), py::arg("make"))
      .def(
          "team", [](Session& self) { return self.team() == nullptr ? std::string() : self.team_name(); },
          py::call_guard<Release>(), "The name by which operators find this rank's team; \"\" where layers are whole.")
      .def(
          "give_up_step",
          [](Session& self, const py::object& exception) {
            const auto error = as_thrown(exception);
            const Release release;
            if (auto* team = self.known_team()) team->give_up(error);
          },
          py::arg("exception"), "Has the other members of the team stop in what they wait for.")
      .def("compare_slices", &compare_slices, py::arg("values"), py::arg("tolerance"),
           "Returns what this rank's values are of whole ones, each pair with what counts as zero: \"alike\", "
           "\"part\", \"scattered\", \"terms\", \"zero\" or \"another\", and of parts the dimension and the sizes of "
           "all; collective.")
      .def(
          "note_call",
          [](Session& self, const std::vector<at::Tensor>& tensors, const std::string& training,
             const std::string& trained, bool on_devices) {
            const Release release;
            session::note_call(self, {tensors, training, trained, on_devices});
          },
          py::arg("tensors"), py::arg("training"), py::arg("trained"), py::arg("on_devices"),
          "Notes a call of the model, for the ranks of the team to compare as they next compute together.")
      .def(
          "whole_of",
          [](Session& self, const at::Tensor& slice, const PythonSlicing& slicing) {
            return session::whole_of(self, slice, to_slicing(self, slicing));
          },
          py::arg("slice"), py::arg("slicing"), py::call_guard<Release>())
      .def(
          "slice_of",
          [](Session& self, const at::Tensor& whole, const PythonSlicing& slicing) {
            return session::slice_of(self, whole, to_slicing(self, slicing));
          },
          py::arg("whole"), py::arg("slicing"), py::call_guard<Release>());
}

namespace {

void bind_cut(py::module_& module) {
  py::class_<BegunCall>(
      module, "HookedCall",
      "A call of a module that has hooks: see [Note: call hooks] in lamina/model/call_hooks.h. Either ends it.")
      .def("end", &BegunCall::end, py::arg("outputs"), py::call_guard<Release>())
      .def("fail", &BegunCall::fail, py::call_guard<Release>());
  py::class_<model::Cut>(module, "Cut",
                         "A model that is cut: see lamina/model/cut.h.\n\nAttributes: owners, anywhere: per node, its "
                         "partition, and whether it runs where its argument lies. here: this rank's partition.")
      .def(py::init([](const model::ModuleTree& tree, std::vector<int> owners, const std::vector<int>& anywhere,
                       int here) { return model::Cut(tree, std::move(owners), anywhere, base::Partition(here)); }),
           py::arg("tree"), py::arg("owners"), py::arg("anywhere"), py::arg("here"))
      .def_property_readonly("owners", &model::Cut::owners)
      .def_property_readonly("anywhere", &model::Cut::anywhere)
      .def_property_readonly("here", [](const model::Cut& cut) { return cut.here().value; })
      .def(
          "owner_of", [](const model::Cut& cut, const std::string& name) { return cut.owner_of(name).value; },
          py::arg("name"), "The partition of a parameter, buffer or module, or of any other part of a state dict.")
      .def("owns", &model::Cut::owns, py::arg("name"), "True where this rank does.");
}

void bind_updates(py::class_<Session, std::shared_ptr<Session>>& kind) {
  kind.def_property_readonly(
          "updates_divided_over",
          [](const Session& session) -> std::optional<std::string> {
            const auto over = model::updates_divided_over(session.topology(), session.config());
            return over ? std::optional(kind_of(*over)) : std::nullopt;
          },
          "The group whose ranks share out what an optimizer updates of a parameter; None where each updates all.")
      .def_property_readonly(
          "updates_masters", [](const Session& session) { return model::updates_masters(session.config()); },
          "True where optimizers update masters in the place of parameters of half precision.")
      .def(
          "share_of",
          [](const Session& session, std::int64_t numel) {
            const auto& topology = session.topology();
            const auto own = layout::share_of(numel, topology.size(Group::kShard),
                                              topology.index(Group::kShard, session.world().rank));
            return std::tuple(own.begin, own.end, own.size);
          },
          py::arg("numel"),
          "This rank's share of so many elements in its sharding group: (begin, end, size); see layout::Share.")
      .def_property_readonly(
          "leads", [](Session& session) { return session.job().leads(); },
          "True where this rank runs the bodies of step functions.")
      .def("hooked_modules", &hooked_modules, py::arg("names"),
           "Numbers the model's modules; returns those whose calls have hooks.")
      .def("begin_call", &begin_call, py::arg("module"), py::arg("remote"),
           py::arg("inputs") = std::vector<at::Tensor>(), py::arg("shown") = py::none(), py::call_guard<Release>(),
           "A call of such a module on this rank, given these tensors.")
      .def_property_readonly(
          "hooks_want_tensors", [](Session& session) { return session.job().call_hooks().want_tensors(); },
          "True where hooks are to be told what calls are given.")
      .def("plan", &plan_model, py::arg("tree"), py::arg("measures"), py::arg("kept"), py::arg("config") = py::none(),
           "Says who is to own what, as the configuration asks, this one or that of another layout, given what a trace "
           "has measured of each node; or as it was, where `kept` has the partition of each module.")
      .def("order_turns", &session::order_turns, py::call_guard<Release>())
      .def_property_readonly("needs_all_microbatches", &session::needs_all_microbatches);
}

void bind_life(py::class_<Session, std::shared_ptr<Session>>& kind) {
  kind.def("begin_life", &begin_life, py::arg("face"),
           "Cuts a model; collective over the world. `face` lends what Python does: see ModelFace in "
           "lamina/session/model_life.h and in lamina/pipeline/model_face.py. ConfigError with the error of world rank "
           "0, if it has one; UsageError where a rank has another model, which names the first line of the description "
           "that differs.")
      .def("gather_state", &gather_state, py::arg("own"), py::arg("to_first") = false, py::arg("cut") = py::none(),
           "Collective over the pipeline: what its ranks own of a state as one, on each, or else on the first alone "
           "and nothing on the others. It is in the order of the ranks, the later one's where two have a name, or in "
           "the plain model's with its cut.")
      .def(
          "release_others",
          [](Session& session, const ParameterTable& table) { model::release_others(table, why_released(session)); },
          py::arg("table"), "Frees the values that are not this rank's, also where views of them are alive.")
      .def("release", &release_tensor, py::arg("tensor"), py::arg("name"), py::arg("partition"),
           py::arg("like") = py::none(),
           "Frees the value of a tensor that another partition owns; shape, dtype and the Python object stay, and any "
           "use of the value is an error that names it. With `like` it first becomes that tensor, of another dtype or "
           "device.")
      .def("norms", &norms, py::arg("table"), py::arg("given"), py::arg("norm_type"),
           "Collective over this rank's pipeline: the norms of what its ranks measure of the model's parameters, in "
           "the model's order; those of other tensors come last. Given as (a parameter or its gradient, what is "
           "measured of it).");
}

}  // namespace

void bind_model(py::module_& module, py::class_<Session, std::shared_ptr<Session>>& kind) {
  bind_plan(module);
  bind_cut(module);
  bind_parameter_table(module);
  bind_recorded_run(kind);
  bind_slices(kind);
  bind_step_check(module);
  bind_updates(kind);
  bind_life(kind);
}

}  // namespace lamina::python
