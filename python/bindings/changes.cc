// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/change.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/data_parallel/newcomers.h"
#include "lamina/environment/progress.h"
#include "lamina/environment/world.h"
#include "lamina/rendezvous/secret.h"
#include "lamina/session/door.h"
#include "lamina/session/newcomer.h"
#include "lamina/session/next_epoch.h"
#include "lamina/session/next_layout.h"
#include "lamina/session/next_place.h"
#include "lamina/session/survivors.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"
#include "python/bindings/hooks.h"
#include "python/bindings/session.h"

namespace lamina::python {
namespace {

using session::ChangingJob;
using session::ChangingOptimizer;
using session::Session;

std::shared_ptr<Session> open_after(Session& before, const config::Config& config) {
  const Release release;
  return with_maker(session::open_after(before, config, face_hooks()));
}

void bind_changing(py::module_& module) {
  py::class_<ChangingOptimizer>(module, "ChangingOptimizer",
                                "An optimizer of a job that is to change its layout: see lamina/session/change.h.")
      .def(py::init([](std::string name, std::string beside, std::string why_not_parts, bool measures_all,
                       bool takes_sparse, bool waits) {
             return ChangingOptimizer{std::move(name), std::move(beside), std::move(why_not_parts),
                                      measures_all,    takes_sparse,      waits};
           }),
           py::kw_only(), py::arg("name"), py::arg("beside"), py::arg("why_not_parts"), py::arg("measures_all"),
           py::arg("takes_sparse"), py::arg("waits"));
  py::class_<ChangingJob>(module, "ChangingJob",
                          "A job that is to change its layout, as far as Python knows it: see "
                          "lamina/session/change.h.")
      .def(py::init([](bool saves, std::vector<std::string> relies, bool waits) {
             return ChangingJob{.saves = saves, .relies = std::move(relies), .waits = waits};
           }),
           py::kw_only(), py::arg("saves"), py::arg("relies"), py::arg("waits"))
      .def_readwrite("has_model", &ChangingJob::has_model)
      .def_readwrite("has_hook", &ChangingJob::has_hook)
      .def_readwrite("joins", &ChangingJob::joins)
      .def_readwrite("odd_buffers", &ChangingJob::odd_buffers)
      .def_readwrite("optimizers", &ChangingJob::optimizers);
}

void bind_layouts(py::class_<Session, std::shared_ptr<Session>>& kind) {
  kind.def("take_over", &session::take_over, py::call_guard<Release>(),
           "The session before is closed: what a process has once is this one's from now on.");
  kind.def("changed_config", &session::changed_config, py::call_guard<Release>(), py::arg("keys_json"),
           "The configuration in the layout that keys of init() ask for: see lamina/session/change.h. Raises "
           "ConfigError and UsageError, alike on all ranks; collective over the world.")
      .def("require_changeable", &session::require_changeable, py::call_guard<Release>(), py::arg("config"),
           py::arg("job"),
           "Raises UsageError, on all ranks, where the job cannot go over to that layout, or not now; collective over "
           "the world.")
      .def("waits_for_trace", &session::waits_for_trace, py::call_guard<Release>(), py::arg("config"),
           py::arg("is_traced"), py::arg("is_whole"),
           "Whether the model stays whole until the next step, which traces and cuts it; collective over the world.")
      .def(
          "next_layout",
          [](Session& before, int ranks, const std::vector<std::string>& layouts, const ChangingJob& job,
             bool share_any) { return session::next_layout(before, ranks, layouts, job, share_any); },
          py::call_guard<Release>(), py::arg("ranks"), py::arg("layouts"), py::arg("job"), py::arg("share_any"),
          "The configuration in which so many of its ranks go on: see lamina/session/next_layout.h. Raises ConfigError "
          "where there is none.")
      .def("require_layouts", &session::require_layouts, py::call_guard<Release>(), py::arg("layouts"),
           "Raises UsageError or ConfigError, on all ranks, for what is no layout; collective over the world.")
      .def("open_after", &open_after, py::arg("config"),
           "Opens the session of another layout, which is to take this one's place; collective over the world.");
  kind.def(
      "put_aside",
      [](Session&, const model::ParameterTable& table, const std::shared_ptr<sharding::Sharding>& sharding) {
        session::put_aside(table, sharding.get());
      },
      py::arg("table"), py::arg("sharding").none(true),
      "Leaves the memory of values and shards to whoever else keeps it for a while.");
}

void bind_survivors(py::module_& module, py::class_<Session, std::shared_ptr<Session>>& kind) {
  module.attr("CHANGES_LAYOUT") = session::kChangesLayout;
  kind.def("why_no_survivors", &session::why_no_survivors, py::arg("keeps_parts"),
           "Why the job cannot go on without a rank; empty where it can: see lamina/session/survivors.h.")
      .def("tell_no_survivors", &session::tell_no_survivors, py::call_guard<Release>(), py::arg("why"),
           "Tells why nobody goes on, where this rank is the first that is left.")
      .def(
          "tell_survivors",
          [](Session& session, const std::vector<std::int64_t>& lost, std::int64_t step, bool is_again, double took) {
            session::tell_survivors(session, {lost.begin(), lost.end()}, step, is_again, took);
          },
          py::arg("lost"), py::arg("step"), py::arg("is_again"), py::arg("took"),
          "Tells, where this rank is the first one, who was lost, and what those who are left do.");
}

void bind_places(py::module_& module) {
  module.def(
      "free_port", [](const Session& session) { return session::FreePort(session).number(); }, py::arg("session"),
      "A port of this machine that was free just now, where ranks of the session reach it.");
  module.def("own_epoch", &session::epoch_of_environment,
             "How often this process has changed the others of its job, as the environment says.");
  const auto take = [](const environment::World& world, std::int64_t epoch) {
    session::take_place(world, epoch);
    py::dict said;
    for (const auto& [name, value] : session::said_place()) said[py::str(name)] = value;
    return said;
  };
  module.def(
      "take_place",
      [take](const Session& before, const session::NextEpoch& next, int port, std::int64_t epoch) {
        return take(session::next_place(before, next, port), epoch);
      },
      py::arg("before"), py::arg("next"), py::arg("port"), py::arg("epoch"),
      "Has the environment of the process say who this rank is from now on; returns what it says: see "
      "lamina/session/next_place.h.");
  module.def(
      "take_newcomers_place",
      [take](const Session& own, const session::NewPlace& place) {
        return take(session::next_place(own, place), place.epoch);
      },
      py::arg("own"), py::arg("place"), "Does so in a process that joins a job.");
}

void bind_epochs(py::module_& module) {
  using session::EpochEnd;
  using session::NextEpoch;
  py::class_<NextEpoch>(module, "NextEpoch", "The ranks that go on without others: see lamina/session/next_epoch.h.")
      .def_readonly("number", &NextEpoch::number)
      .def_property_readonly(
          "leaving",
          [](const NextEpoch& next) {
            std::vector<std::int64_t> ranks;
            for (const auto rank : next.leaving) ranks.push_back(rank.value);
            return ranks;
          },
          "Who leaves in order, by their ranks until now.")
      .def_property_readonly(
          "newcomers", [](const NextEpoch& next) { return next.newcomers.size(); },
          "How many ranks join those who have told something.")
      .def_readonly("rank", &NextEpoch::rank, "This one's place among them.")
      .def_property_readonly(
          "words",
          [](const NextEpoch& next) {
            py::list words;
            for (const auto& word : next.words) words.append(to_object(word));
            return words;
          },
          "Tells by place what each has told.");
  py::class_<EpochEnd>(module, "EpochEnd",
                       "The end of a session that has lost ranks, as the others make it: see "
                       "lamina/session/next_epoch.h.")
      .def(py::init<Session&, session::Door*>(), py::arg("session"), py::arg("door").none(true), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def(
          "next",
          [](EpochEnd& end, const py::object& word, std::int64_t progress, bool leaves) {
            const auto value = to_value(word);
            const Release release;
            return end.next(value, progress, leaves);
          },
          py::arg("word"), py::arg("progress"), py::arg("leaves"),
          "Agrees with the others who goes on, and what each tells; collective over those who are left. Raises "
          "PeerError where they are too few.")
      .def(
          "open",
          [](EpochEnd& end, const NextEpoch& next, std::optional<int> microbatches, std::int64_t epoch) {
            const Release release;
            return with_maker(end.open(next, microbatches, environment::read_world(environment::process_environment()),
                                       epoch, face_hooks()));
          },
          py::arg("next"), py::arg("microbatches"), py::arg("epoch"),
          "Opens the session of those who go on, with this one's place as the environment says it, and so many "
          "microbatches of each copy; None: as many of all copies as before.")
      .def(
          "open_in",
          [](EpochEnd& end, const NextEpoch& next, const config::Config& config) {
            const Release release;
            return with_maker(
                end.open_in(next, config, environment::read_world(environment::process_environment()), face_hooks()));
          },
          py::arg("next"), py::arg("config"), "Does so in that layout.");
}

// At the first rank of an elastic job; none where its launcher starts nobody anew.
std::unique_ptr<session::Door> open_door(const Session& session, const session::Facts& facts) {
  const auto plate = session::DoorPlate::of_environment();
  const auto secret = rendezvous::inherited_secret();
  if (!plate || !secret) return nullptr;
  return std::make_unique<session::Door>(*plate, session.world().master_addr, *secret,
                                         session::facts_of(session, facts));
}

void bind_newcomers(py::module_& module) {
  using session::Door;
  using session::Newcomer;
  using session::NewPlace;
  py::class_<Door>(module, "Door", "Where newcomers come to the first rank: see lamina/session/door.h.")
      .def_static("open", &open_door, py::arg("session"), py::arg("facts"),
                  "Opens it for newcomers that have these facts in common with the job; None where the launcher has "
                  "said of no such place.")
      .def(
          "set_terms",
          [](Door& door, Session& session, int most, bool shares_any) {
            const int copies = session.world().size;
            const auto all = std::int64_t{session.job().microbatches()} * copies;
            door.set_terms({.copies = copies, .most = most, .microbatches = shares_any ? 0 : all});
          },
          py::arg("session"), py::arg("most"), py::arg("shares_any"),
          "How many ranks there may be with newcomers, and whether copies share out any number of microbatches.")
      .def(
          "tell", [](const Door& door, Session& session) { session::tell_door(session, door); }, py::arg("session"),
          "Tells the other machines where it is.")
      .def_property_readonly("has_waiting", &Door::has_waiting, "Whether somebody waits who may come in.")
      .def("end", &Door::end, "The training is over: nobody comes in any more.");
  module.def("hear_of_door", &session::hear_of_door, py::arg("session"),
             "Has newcomers of this machine find the door of another one, once its rank has told where it is.");
  module.def("end_door", &session::end_door, py::arg("session"),
             "Tells newcomers of this machine that the training is over.");
  py::class_<NewPlace>(module, "NewPlace", "A newcomer's place in the job: see lamina/session/newcomer.h.")
      .def_readonly("rank", &NewPlace::rank)
      .def_readonly("size", &NewPlace::size);
  py::class_<Newcomer>(module, "Newcomer", "A process that joins a job: see lamina/session/newcomer.h.")
      .def(py::init<const Session&, const session::Facts&>(), py::arg("own"), py::arg("facts"))
      .def("wait", &Newcomer::wait, py::call_guard<Release>(),
           "Waits for a place; None where the job is over. Raises ConfigError where the job refuses this process.")
      .def(
          "open",
          [](Newcomer& newcomer, Session& own, const NewPlace& place) {
            const Release release;
            return with_maker(
                newcomer.open(own, place, environment::read_world(environment::process_environment()), face_hooks()));
          },
          py::arg("own"), py::arg("place"),
          "Opens the job's session at that place, which the environment says, too. Raises PeerError where the others "
          "go on without this process.");
  module.def(
      "newcomers_wait", [] { return data_parallel::newcomers().heard.load(); },
      "Whether a pass of all copies has told that newcomers wait.");
  module.def(
      "want_to_leave", [](bool leaves) { data_parallel::newcomers().leaves = leaves; }, py::arg("leaves"),
      "Has the passes of this rank tell all copies that it wants to leave.");
  module.def(
      "tell_leaving", [] { environment::ProgressReporter().leaves(); },
      "Tells the launcher that this rank leaves a job that goes on without it.");
  module.def(
      "forget_newcomers", [] { data_parallel::newcomers().heard = false; },
      "An epoch has begun: nobody has told of any.");
}

}  // namespace

void bind_changes(py::module_& module, py::class_<Session, std::shared_ptr<Session>>& kind) {
  bind_changing(module);
  bind_layouts(kind);
  bind_epochs(module);
  bind_survivors(module, kind);
  bind_newcomers(module);
  bind_places(module);
}

}  // namespace lamina::python
