// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/session.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/hash.h"
#include "lamina/data_parallel/reducer.h"
#include "lamina/device/rank_device.h"
#include "lamina/device/sharing.h"
#include "lamina/device/upload.h"
#include "lamina/dist/ranks.h"
#include "lamina/messaging/agreement.h"
#include "lamina/messaging/same_arguments.h"
#include "lamina/model/cut.h"
#include "lamina/pipeline/backwards.h"
#include "lamina/remote/anywhere.h"
#include "lamina/session/chosen_device.h"
#include "lamina/session/device_end.h"
#include "lamina/session/slicing.h"
#include "lamina/topology/saved_place.h"
#include "python/bindings/batches.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"
#include "python/bindings/hooks.h"
#include "python/bindings/model.h"
#include "python/bindings/session.h"

namespace lamina::python {
namespace {

using session::Session;
using topology::Group;

// Members of the group that this rank is in, or another one.
std::vector<int> group_members(Session& session, const std::string& kind, std::optional<int> rank) {
  const auto of = rank ? base::Rank(*rank) : session.world().rank;
  std::vector<int> members;
  for (auto rank : session.topology().members(group_of(kind), of)) members.push_back(static_cast<int>(rank.value));
  return members;
}

// A function of Python's on every rank: what others have it make is made by the face (python/lamina/remote/placed.py).
constexpr auto kMaker = "lamina.make";

value::Value make_remote(value::Value arguments) {
  const py::gil_scoped_acquire gil;
  return to_value(hooks().make_remote(*to_object(arguments).cast<py::tuple>()));
}

std::shared_ptr<Session> open(const config::Config& config) {
  const Release release;
  return with_maker(
      std::make_shared<Session>(config, environment::read_world(environment::process_environment()), face_hooks()));
}

// Objects.

void send(Session& session, int rank, const std::string& channel, py::handle object) {
  auto value = to_value(object);
  const Release release;
  session.mailbox().send(base::Rank(rank), channel, std::move(value));
}

py::object receive(Session& session, int rank, const std::string& channel) {
  value::Value value;
  {
    const Release release;
    value = session.mailbox().receive(base::Rank(rank), channel, session.patience());
  }
  return to_object(value);
}

py::list all_gather(Session& session, const std::string& kind, py::handle object) {
  auto value = to_value(object);
  std::vector<value::Value> values;
  {
    const Release release;
    values = session.mailbox().all_gather(session.members(group_of(kind)), value, session.patience());
  }
  py::list objects;
  for (const auto& one : values) objects.append(to_object(one));
  return objects;
}

std::optional<py::tuple> first_given(Session& session, const std::string& kind, py::handle object) {
  std::optional<value::Value> own;
  if (!object.is_none()) own = to_value(object);
  std::optional<messaging::FirstGiven> first;
  {
    const Release release;
    first =
        messaging::first_given(session.mailbox(), session.members(group_of(kind)), std::move(own), session.patience());
  }
  if (!first) return std::nullopt;
  return py::make_tuple(first->rank.value, to_object(first->value));
}

bool are_alike(Session& session, const std::string& kind, const std::string& text) {
  const auto hash = static_cast<std::int64_t>(base::hash64(std::string_view(text)));
  const Release release;
  return messaging::are_alike(session.mailbox(), session.members(group_of(kind)), hash, session.patience());
}

double largest(Session& session, const std::string& kind, double number) {
  const Release release;
  return messaging::largest(session.mailbox(), session.members(group_of(kind)), {number}, session.patience()).front();
}

// See messaging::differing_arguments; `given` has names and values.
std::string differing_arguments(Session& session, const std::string& kind, const std::string& call,
                                const std::vector<std::pair<std::string, std::string>>& given) {
  std::vector<messaging::Argument> arguments;
  for (const auto& [name, value] : given) arguments.push_back({name, value});
  const Release release;
  return messaging::differing_arguments(session.mailbox(), session.members(group_of(kind)), call, arguments,
                                        session.patience());
}

void barrier(Session& session, const std::string& kind) {
  session.mailbox().barrier(session.members(group_of(kind)), session.patience());
}

// Why `rank` is lost, as soon as it is; "" when it is not within that time.
std::string loss(Session& session, int rank, double within_s) {
  const base::Rank ranks[] = {base::Rank(rank)};
  const std::chrono::milliseconds within(static_cast<std::int64_t>(within_s * 1000));
  const auto loss = session.mailbox().loss(ranks, within);
  return loss ? loss->text() : "";
}

// The model, once it is cut.

using RunRow = std::tuple<std::string, int, int>;  // name, partition, how many random streams it starts

void set_model(Session& session, const model::Cut& cut, std::vector<std::string> names, std::vector<bool> own_stream,
               std::vector<bool> dynamic, const std::vector<RunRow>& runs) {
  std::vector<base::Rank> ranks;
  std::vector<int> streams(own_stream.begin(), own_stream.end());
  for (std::size_t node = 0; node < names.size(); ++node) {
    const base::Partition owner(cut.owners().at(node));
    ranks.push_back(cut.anywhere().at(node) ? remote::kAnywhere : session.owner(owner));
  }
  for (const auto& [name, owner, starts] : runs) {
    names.push_back(name);
    ranks.push_back(session.owner(base::Partition(owner)));
    own_stream.push_back(false);
    streams.push_back(starts);
    dynamic.push_back(false);
  }
  session.job().set_model(
      python_modules(std::move(names), std::move(own_stream), std::move(streams), std::move(dynamic)),
      std::move(ranks));
}

void set_order(Session& session, std::vector<at::Tensor> parameters, bool forwards_change_the_model) {
  session.job().set_order(std::move(parameters), forwards_change_the_model);
}

void watch_flags(Session& session, std::vector<std::string> names, const std::vector<std::optional<at::Tensor>>& held) {
  remote::Tensors tensors;
  for (const auto& tensor : held) tensors.push_back(tensor.value_or(at::Tensor()));
  session.job().watch_flags(std::move(names), std::move(tensors));
}

using BatchNormRow = std::tuple<std::string, at::Tensor, at::Tensor, at::Tensor, std::optional<double>>;

void set_statistics(Session& session, const std::vector<BatchNormRow>& rows) {
  std::vector<runtime::BatchNorm> modules;
  for (const auto& [name, mean, var, count, momentum] : rows) modules.push_back({name, mean, var, count, momentum});
  session.job().set_statistics(std::move(modules));
}

// The step.

// A step body in Python and its results, shared with the threads that run it. Touched with the GIL held only.
struct PythonBody {
  py::object function;
  std::vector<py::object> results;

  static std::shared_ptr<PythonBody> make(const py::object& function, int microbatches) {
    const auto destroy = [](PythonBody* body) {
      py::gil_scoped_acquire gil;
      delete body;
    };
    return {new PythonBody{function, std::vector<py::object>(microbatches)}, destroy};
  }
};

// A function of Python's, as one of the engine's, which may call and destroy it in any thread.
std::function<void()> lent(const py::object& function) {
  if (function.is_none()) return nullptr;
  const auto destroy = [](py::object* held) {
    py::gil_scoped_acquire gil;
    delete held;
  };
  return [held = std::shared_ptr<py::object>(new py::object(function), destroy)] {
    py::gil_scoped_acquire gil;
    (*held)();
  };
}

void cut_here(Session& session, const py::object& cut) {
  auto lent_cut = lent(cut);
  const Release release;
  session.job().cut_here(std::move(lent_cut));
}

// A step as Python describes it: with the model's backwards, and the copies of the model, if there are any.
struct PythonStep {
  int microbatches;
  py::object body, merge, cut;
  std::pair<std::string, std::string> call;
  pipeline::Backwards* backwards;
  std::vector<std::int64_t> samples;
  pipeline::Backwards::Parameters parameters;
  data_parallel::Reducer* reducer;
  bool training;
};

// Results of the bodies, on the leading rank the very objects.
py::list outputs_of(pipeline::StepResult& result, const PythonBody* body) {
  py::list objects;
  for (std::size_t i = 0; i < result.outputs.size(); ++i) {
    if (body != nullptr) {
      objects.append(body->results.at(i));
      continue;
    }
    value::for_each_tensor(result.outputs.at(i), [](at::Tensor& tensor) {
      if (tensor.defined()) tensor.set_requires_grad(false);
    });
    objects.append(to_object(result.outputs.at(i)));
  }
  return objects;
}

py::object run_step(Session& session, const PythonStep& step) {
  auto& job = session.job();
  const auto body = PythonBody::make(step.body, step.microbatches);
  const auto run_body = [body, followed = !job.alone()](base::Microbatch microbatch) -> value::Value {
    py::gil_scoped_acquire gil;
    py::object result = body->function(microbatch.value);
    auto value = followed ? to_value(result) : value::Value();
    body->results.at(microbatch.value) = std::move(result);
    return value;
  };
  py::object merged;
  const auto run_here = [&](const pipeline::StepSpec& spec) {
    return job.alone() ? job.run_step_here(spec) : job.run_step(spec);
  };
  const auto run = [&](const pipeline::StepSpec& spec) {
    auto result =
        step.backwards == nullptr ? run_here(spec) : step.backwards->run_step(spec, step.parameters, run_here);
    const py::gil_scoped_acquire gil;  // a result that cannot be merged is an error of the step
    merged = step.merge(outputs_of(result, job.leads() ? body.get() : nullptr), result.samples);
    return result;
  };
  pipeline::StepSpec spec{step.microbatches,
                          run_body,
                          session.patience().check_interrupt,
                          {step.call.first, step.call.second, ""},
                          lent(step.cut)};
  spec.samples = step.samples;
  {
    const Release release;
    session::run_step(session, std::move(spec), [&](const pipeline::StepSpec& spec) {
      step.reducer == nullptr ? run(spec) : step.reducer->run_step(spec, step.training, run);
    });
  }
  return merged;
}

py::object call(Session& session, int index, const py::tuple& args, const py::dict& kwargs) {
  value::Value arguments = value::Tuple{{to_value(args), to_value(kwargs)}};
  {
    const Release release;
    arguments = session.job().call(base::ModuleId(index), std::move(arguments));
  }
  return to_object(arguments);
}

py::list take_notes(Session& session) {
  py::list notes;
  for (const auto& note : session.job().take_notes()) notes.append(py::bytes(note));
  return notes;
}

// How Python makes torch's groups, until the session is closed.
void make_groups_by(Session& session, const py::function& make) {
  session.groups().make_by([make](Group axis) {
    const py::gil_scoped_acquire acquire;
    return make(kind_of(axis)).cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
  });
}

bool close_session(const std::shared_ptr<Session>& session, bool orderly) {
  session->groups().close();
  const Release release;
  const bool ended = session->close(orderly);
  // A session that a thread still works in lives as long as the process.
  if (!ended) [[maybe_unused]]
    const auto* kept = new std::shared_ptr<Session>(session);
  return ended;
}

bool leave_session(const std::shared_ptr<Session>& session, bool interrupted) {
  session->groups().close();
  const Release release;
  [[maybe_unused]] const auto* kept = new std::shared_ptr<Session>(session);
  return session->leave(interrupted);
}

void bind_steps(py::class_<Session, std::shared_ptr<Session>>& kind) {
  kind.def_property(
          "seeded_steps", [](Session& session) { return session.job().seeds().steps(); },
          [](Session& session, std::uint64_t steps) { session.job().seeds().go_on_after(steps); },
          "With the key `seed`, how many steps have drawn random numbers; to be set outside of steps.")
      .def(
          "set_seed", [](Session& session, std::uint64_t seed) { session.job().seeds().reseed(seed); }, py::arg("seed"))
      .def_property(
          "microbatches", [](Session& session) { return session.job().microbatches(); },
          [](Session& session, int microbatches) { session.job().set_microbatches(microbatches); },
          "Into how many a step cuts its batch: at most, of this copy of the model.")
      .def(
          "number_microbatches",
          [](Session& session, std::vector<std::int64_t> numbers) { session.job().seeds().number(std::move(numbers)); },
          py::arg("numbers"), "Numbers of this copy's microbatches among those of all: random numbers go by them.")
      .def_property(
          "all_microbatches", [](Session& session) { return session.job().all_microbatches(); },
          [](Session& session, std::int64_t all) {
            session.job().share_out(all, session::needs_all_microbatches(session));
          },
          "How many all copies of the model share out: the same on all ranks.");
}

void bind_values(py::class_<Session, std::shared_ptr<Session>>& kind) {
  kind.def("send", &send, py::arg("rank"), py::arg("channel"), py::arg("value"))
      .def("receive", &receive, py::arg("rank"), py::arg("channel"))
      .def("all_gather", &all_gather, py::arg("kind"), py::arg("value"))
      .def("first_given", &first_given, py::arg("kind"), py::arg("value"),
           "The first rank that gives something but None, and that.")
      .def("are_alike", &are_alike, py::arg("kind"), py::arg("text"))
      .def("largest", &largest, py::arg("kind"), py::arg("number"))
      .def("differing_arguments", &differing_arguments, py::arg("kind"), py::arg("call"), py::arg("given"))
      .def("barrier", &barrier, py::call_guard<Release>(), py::arg("kind"))
      .def("loss", &loss, py::call_guard<Release>(), py::arg("rank"), py::arg("within_s"),
           "Waits until `rank` is lost and says why; \"\" when it is not in that time.");
}

void bind_calls(py::class_<Session, std::shared_ptr<Session>>& kind) {
  kind.def("set_model", &set_model, py::arg("cut"), py::arg("names"), py::arg("own_stream"), py::arg("dynamic"),
           py::arg("runs"),
           "The modules by index, before the first call: their names, whether calls of each run in a random stream of "
           "their own, and whether its results must not be predicted. Then runs, modules that are called as one: the "
           "name, the partition, and how many streams a call starts.")
      .def("set_order", &set_order, py::arg("parameters"), py::arg("forwards_change_the_model"),
           "With `deterministic_server`, before each step, on every rank: the parameters that this rank owns, and "
           "whether forwards change the model, wherever it lives and but for `set_statistics`, so that microbatches "
           "have to take turns.")
      .def("watch_flags", &watch_flags, py::arg("names"), py::arg("tensors"),
           "Before a step, alike on every rank of the pipeline: the tensors whose requires_grad a step body may set.")
      .def("set_statistics", &set_statistics, py::arg("modules"),
           "After it, before each step: (name, running mean, running variance, count, momentum) of the BatchNorms of "
           "this rank. After the step they are those of the plain loop.")
      .def(
          "run_step",
          [](Session& session, int microbatches, py::object body, py::object merge, py::object cut,
             std::pair<std::string, std::string> call, std::vector<std::int64_t> samples,
             pipeline::Backwards* backwards, pipeline::Backwards::Parameters parameters,
             data_parallel::Reducer* reducer, bool training) {
            return run_step(session, {microbatches, std::move(body), std::move(merge), std::move(cut), std::move(call),
                                      backwards, std::move(samples), std::move(parameters), reducer, training});
          },
          py::arg("microbatches"), py::arg("body"), py::arg("merge"), py::kw_only(), py::arg("cut") = py::none(),
          py::arg("call") = std::pair<std::string, std::string>(), py::arg("samples") = std::vector<std::int64_t>(),
          py::arg("backwards") = py::none(), py::arg("parameters") = py::none(), py::arg("reducer") = py::none(),
          py::arg("training") = false,
          "Runs one step; every rank of the pipeline calls it. `body(microbatch)` runs on worker threads of the "
          "leading rank (pp_rank 0) only; where the pipeline is this rank alone, for one microbatch after the other in "
          "this thread. Returns what `merge` makes of its results, one per microbatch, on every rank. With `cut` this "
          "is the step in which the model is cut: that does so where no body has called `cut_here`. `call` is the step "
          "function's name, the same on all ranks (DesyncError else), and where it was called.\n\nOf a model: its "
          "`backwards`; why one in this step is an error, if it is; and its parameters, by which others are noticed. "
          "With several copies of it `reducer` is theirs, and ends the pass; `training` is the model's mode.")
      .def(
          "cut_here", &cut_here, py::arg("cut"),
          "In a body of the step in which the model is cut: has the thread that entered the step run `cut`, unless the "
          "model is cut already, and waits for that. UsageError in another thread; CancelledError where a cut failed.")
      .def("take_notes", &take_notes, "Returns what owners of modules left for this rank in their answers, each once.")
      .def("require_everywhere", &Session::require_everywhere, py::arg("what"),
           "Refuses `what` in the body of a step: every rank of a pipeline is to do it.")
      .def("call", &call, py::arg("index"), py::arg("args"), py::arg("kwargs"),
           "Calls module `index` on the rank that owns it. Inside a step only.")
      .def("await_device", &session::await_device, py::call_guard<Release>(),
           "Waits for what the rank's device has still to compute.")
      .def(
          "tell_leaving", [](Session& session, const std::string& how) { session.tell_leaving(how); },
          py::call_guard<Release>(), py::arg("how"),
          "Tells the other ranks how this one comes to leave: before close() or leave().");
}

void bind_devices(py::module_& module) {
  module.def("upload", &devices::upload, py::call_guard<Release>(), py::arg("tensor"), py::arg("device"),
             "The tensor on a device; nobody waits for that where it comes from the host.");
  module.def("rank_device", &devices::rank_device, "The device that this process's rank computes on.");
  module.def("shares_devices", &devices::shares_devices, "True where ranks of this process's job share accelerators.");
  module.def(
      "chosen_device",
      [](const std::string& key) {
        const auto local = dist::told("LOCAL_RANK", environment::process_environment());
        return session::chosen_device(key, static_cast<int>(local.value_or(0)));
      },
      py::arg("key"),
      "The device that the key `device` would choose for a rank of this process; LAMINA_DEVICE is above it. Raises "
      "ConfigError, which says what there is.");
}

}  // namespace

std::shared_ptr<Session> with_maker(std::shared_ptr<Session> session) {
  session->parameter_server().place({kMaker, &make_remote, {}});
  return session;
}

void bind_session(py::module_& module) {
  module.attr("INTERRUPTED") = base::kInterrupted;
  bind_devices(module);
  auto kind = py::class_<Session, std::shared_ptr<Session>>(
      module, "Session",
      "The engine of this rank, from init to shutdown. Calls that wait release the GIL and notice signals.");
  bind_model(module, kind);
  bind_batches(module);
  bind_backwards(module);
  bind_values(kind);
  bind_calls(kind);
  bind_steps(kind);
  bind_changes(module, kind);
  kind.def(py::init(&open), py::arg("config"), "Reads the launcher's environment, connects the ranks.")
      .def_property_readonly("config", &Session::config)
      .def_property_readonly("asked", &Session::asked, "The configuration that the program has asked for.")
      .def_property_readonly("rank", [](Session& s) { return s.world().rank.value; })
      .def_property_readonly("size", [](Session& s) { return s.world().size; })
      .def_property_readonly("local_rank", [](Session& s) { return s.world().local_rank; })
      .def_property_readonly("local_size", [](Session& s) { return s.world().local_size; })
      .def_property_readonly("launched", [](Session& s) { return s.world().launched; })
      .def(
          "group_rank",
          [](Session& s, const std::string& kind) { return s.topology().index(group_of(kind), s.world().rank); },
          py::arg("kind"))
      .def(
          "group_size", [](Session& s, const std::string& kind) { return s.topology().size(group_of(kind)); },
          py::arg("kind"))
      .def("group_members", &group_members, py::arg("kind"), py::arg("rank") = py::none(),
           "World ranks of this rank's group of that kind.")
      .def(
          "translate",
          [](Session& s, const std::string& kind, int index) {
            return s.topology().translate(group_of(kind), index, s.world().rank).value;
          },
          py::arg("kind"), py::arg("index"), "World rank of member `index` of this rank's group of that kind.")
      .def(
          "saved_place",
          [](Session& s, bool of_shards) {
            return py::tuple(py::cast(topology::saved_place(s.topology(), s.world().rank, of_shards)));
          },
          py::arg("of_shards"), "The part of a model that a state here has: see lamina/topology/saved_place.h.")
      .def(
          "why_elsewhere",
          [](Session& s, const topology::SavedPlace& saved) {
            return topology::why_elsewhere(saved, s.topology(), s.world().rank);
          },
          py::arg("saved"), "Says what keeps a part that was saved from being loaded here, \"\" if nothing.")
      .def_property_readonly(
          "stuck", [](Session& session) { return session.groups().stuck(); },
          "A collective of a group was left that may never end; also true afterwards.")
      .def("make_groups_by", &make_groups_by, py::arg("make"),
           "Has `make` give torch's process group of a kind when the engine first uses it.")
      .def("close", &close_session, py::arg("orderly"),
           "Ends the session; idempotent. `orderly` waits a bounded time until the peers have what was sent. False "
           "when a thread is still in the user's code of a step that failed.")
      .def("leave", &leave_session, py::arg("interrupted"),
           "At the end of the process: as close(), but the connections stay until the process has ended, so that the "
           "peers take that for this rank's end. Where it was `interrupted` (Ctrl-C), they are told so at once.");
}

}  // namespace lamina::python
