// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/survivors.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/session/next_place.h"
#include "lamina/session/part_survivors.h"
#include "python/bindings/bindings.h"
#include "python/bindings/carried_errors.h"
#include "python/bindings/checkpointed_job.h"
#include "python/bindings/convert.h"
#include "python/bindings/hooks.h"
#include "python/bindings/saves.h"
#include "python/bindings/session.h"

namespace lamina::python {
namespace {

using session::Session;
using session::Told;

// Calls what the engine asks of whoever outlives ranks: an error of a loss is one that the engine knows.
template <class Call>
auto lent(const Call& call) {
  const py::gil_scoped_acquire acquire;
  try {
    return call();
  } catch (py::error_already_set& error) {
    const auto is = [&](const char* name) { return error.matches(hooks().errors.attr(name)); };
    const bool is_lost = is("PeerError");
    if (!is_lost && !is("DesyncError")) throw;
    const auto text = py::str(error.value()).cast<std::string>();
    if (is_lost) throw CarriedAs<base::PeerError>(std::move(error), text);
    throw CarriedAs<base::DesyncError>(std::move(error), text);
  }
}

// Calls the engine, without the GIL. Python ends the process where the engine would.
template <class Call>
auto outliving(const Call& call) {
  try {
    return uncarried(call);
  } catch (const session::ProcessEnds& ends) {
    PyErr_SetObject(PyExc_SystemExit, py::int_(ends.code).ptr());
    throw py::error_already_set();
  }
}

py::list to_list(const std::vector<Told>& told) {
  py::list all;
  for (const auto& [progress, word] : told) all.append(py::make_tuple(progress, to_object(word)));
  return all;
}

// Survivors in python/lamina/elastic/survivors.py, which outlives it: what both kinds are asked.
template <class Face>
class PythonFace : public Face {
 public:
  explicit PythonFace(py::handle face) : face_(face) {}

  std::int64_t progress() const override {
    return lent([&] { return face_.attr("progress").cast<std::int64_t>(); });
  }
  std::shared_ptr<Session> session() const override {
    return lent([&] { return face_.attr("session").cast<std::shared_ptr<Session>>(); });
  }
  void end_saves(bool is_lost) override {
    lent([&] { face_.attr("end_saves")(is_lost); });
  }
  value::Value word() const override { return ask_value("word"); }
  void all_leave() override {
    lent([&] { face_.attr("all_leave")(); });
  }

 protected:
  value::Value ask_value(const char* name) const {
    return lent([&] { return to_value(face_.attr(name)()); });
  }

  const py::handle face_;
};

class PythonCopies : public PythonFace<session::CopiesFace> {
 public:
  using PythonFace::PythonFace;

  std::vector<std::pair<std::string, at::Tensor>> buffers() const override {
    return lent([&] { return face_.attr("buffers")().cast<std::vector<std::pair<std::string, at::Tensor>>>(); });
  }
  void go_over(std::shared_ptr<Session> session) override {
    lent([&] { face_.attr("_go_over")(with_maker(std::move(session)), py::none()); });
  }
  value::Value states() const override { return ask_value("states"); }
  void take(const value::Value* states) override {
    lent([&] { face_.attr("take")(states == nullptr ? py::object(py::none()) : to_object(*states)); });
  }
};

// KeptSurvivors in python/lamina/elastic/kept.py.
class PythonParts : public PythonFace<session::PartsFace> {
 public:
  using PythonFace::PythonFace;

  std::unique_ptr<job_checkpoint::JobAccess> lend() override {
    return lent([&]() -> std::unique_ptr<job_checkpoint::JobAccess> {
      const auto session = face_.attr("session").cast<std::shared_ptr<Session>>();
      return std::make_unique<PythonCheckpointedJob>(*session, face_.attr("lend")());
    });
  }
  session::ChangingJob told() const override {
    return lent([&] { return face_.attr("told")().cast<session::ChangingJob>(); });
  }
  value::Value state() const override { return ask_value("states"); }
  void take(const value::Value& state) override {
    lent([&] { face_.attr("take")(to_object(state)); });
  }
  value::Value given() const override { return ask_value("given"); }
  void take_given(const value::Value& given) override {
    lent([&] { face_.attr("take_given")(to_object(given)); });
  }
  void go_over(std::shared_ptr<Session> session, const std::function<job_checkpoint::HeldJob()>& hold) override {
    lent([&] {
      if (!hold) return void(face_.attr("_go_over")(with_maker(std::move(session)), py::none()));
      const py::cpp_function held(
          [&] { return uncarried([&] { return std::make_shared<job_checkpoint::HeldJob>(hold()); }); });
      face_.attr("_go_over")(with_maker(std::move(session)), held);
    });
  }
};

session::SurvivorOptions options_of(py::handle face) {
  session::SurvivorOptions options;
  options.hooks = face_hooks;
  options.note_place = [face] {
    lent([&] {
      py::dict said;
      for (const auto& [name, value] : session::said_place()) said[py::str(name)] = value;
      face.attr("take_place")(said);
    });
  };
  options.facts = [face] {
    return lent([&] {
      const auto [file, tensors, table, optimizer, groups] =
          face.attr("facts")()
              .cast<std::tuple<std::string, std::vector<std::pair<std::string, at::Tensor>>,
                               const model::ParameterTable*, std::string, std::vector<std::size_t>>>();
      return session::facts_of_training("script", file, tensors, table, optimizer, groups);
    });
  };
  return options;
}

struct LentCopies {
  explicit LentCopies(py::handle lent_face) : face(lent_face), engine(face, options_of(lent_face)) {}

  PythonCopies face;
  session::CopySurvivors engine;
};

struct LentParts {
  LentParts(py::handle lent_face, std::optional<std::int64_t> every, std::vector<std::string> layouts)
      : face(lent_face), engine(face, options_of(lent_face), every, std::move(layouts)) {}

  PythonParts face;
  session::PartSurvivors engine;
};

// Adds what both kinds have.
template <class Kind, class Class>
void bind_loop(Class& kind) {
  kind.def(
          "begin",
          [](Kind& self) -> std::optional<py::list> {
            const auto told = outliving([&] { return self.engine.begin(); });
            return told ? std::optional(to_list(*told)) : std::nullopt;
          },
          "The training begins: newcomers may come. A process that is one joins, and returns what go_on() does; else "
          "None. Raises SystemExit in one where the job is over, ConfigError in one that differs.")
      .def(
          "may_go_on", [](Kind& self) { return uncarried([&] { return self.engine.may_go_on(); }); },
          "Whether a rank is lost, and the others go on. Where they do not, the first of them says why.")
      .def(
          "go_on",
          [](Kind& self, bool is_lost) { return to_list(outliving([&] { return self.engine.go_on(is_lost); })); },
          py::arg("is_lost"),
          "Goes on with those who are left, and newcomers; collective over these. Returns what each has told. Raises "
          "PeerError where too few are left, SystemExit in a rank that leaves.")
      .def_property_readonly(
          "is_called", [](const Kind& self) { return self.engine.is_called(); },
          "Whether newcomers wait, or some want to leave: all ranks alike, after an update.")
      .def(
          "tell_going_on",
          [](Kind& self, std::int64_t step, bool is_again) {
            uncarried([&] { self.engine.tell_going_on(step, is_again); });
          },
          py::arg("step"), py::arg("is_again"),
          "Says once, on the first rank, who was lost in that step, or joined before it, and what all do.")
      .def(
          "open_after",
          [](Kind& self, const config::Config& config) {
            return with_maker(uncarried([&] { return self.engine.open_after(config); }));
          },
          py::arg("config"),
          "lamina.change(): opens the session of another layout; collective over the world. Raises what ends the "
          "change: all go on in the layout that there was, then.")
      .def(
          "close_door", [](Kind& self) { self.engine.close_door(); }, py::call_guard<Release>(),
          "The training is over: nobody comes in any more.")
      .def(
          "watch_sigterm", [](Kind& self) { self.engine.doorway().watch_sigterm(); },
          "From now on SIGTERM has this rank leave in order, unless the script has said what that does.")
      .def("forget_sigterm", [](Kind& self) { self.engine.doorway().forget_sigterm(); }, "It does what it did before.");
}

void bind_copies(py::module_& module) {
  py::class_<LentCopies, std::unique_ptr<LentCopies, EndWithoutGil>> kind(
      module, "Survivors",
      "Copies that go on where others are lost, and those who join: see lamina/session/survivors.h. `face`: "
      "Survivors in python/lamina/elastic/survivors.py, which outlives it.");
  kind.def(py::init([](py::handle face) {
             return std::unique_ptr<LentCopies, EndWithoutGil>(
                 uncarried([&] { return std::make_unique<LentCopies>(face).release(); }));
           }),
           py::arg("face"))
      .def(
          "keep", [](LentCopies& self) { uncarried([&] { self.engine.keep(); }); },
          "Notes what a batch changes besides the parameters, where it has been changed.");
  bind_loop<LentCopies>(kind);
}

void bind_parts(py::module_& module) {
  py::class_<LentParts, std::unique_ptr<LentParts, EndWithoutGil>> kind(
      module, "PartSurvivors",
      "Ranks with parts that go on where others are lost: see lamina/session/part_survivors.h. `face`: KeptSurvivors "
      "in python/lamina/elastic/kept.py, which outlives it.");
  kind.def(py::init([](py::handle face, std::optional<std::int64_t> every, std::vector<std::string> layouts) {
             return std::unique_ptr<LentParts, EndWithoutGil>(
                 uncarried([&] { return std::make_unique<LentParts>(face, every, std::move(layouts)).release(); }));
           }),
           py::arg("face"), py::arg("every").none(true), py::arg("layouts"))
      .def(
          "end", [](LentParts& self) { uncarried([&] { self.engine.end(); }); },
          "Waits for the others, who may lose one still: all go on together then.")
      .def(
          "succeed", [](LentParts& self, LentCopies& before) { self.engine.succeed(before.engine); }, py::arg("before"),
          py::call_guard<Release>(), "Goes on in the place of copies, whose job takes a layout with parts.")
      .def(
          "note_update", [](LentParts& self) { uncarried([&] { self.engine.note_update(); }); },
          "The next step keeps what an update has made.")
      .def_property_readonly(
          "is_due", [](LentParts& self) { return uncarried([&] { return self.engine.is_due(); }); },
          "Whether the step that begins is to keep a version. Collective over the world, once after each update.")
      .def(
          "listen", [](LentParts& self) { return uncarried([&] { return self.engine.listen(); }); },
          "Hears whether newcomers wait, or some want to leave; collective over the world.")
      .def(
          "keep", [](LentParts& self) { uncarried([&] { self.engine.keep(); }); },
          "Keeps it; collective over the world.")
      .def(
          "keep_everywhere", [](LentParts& self) { uncarried([&] { self.engine.keep_everywhere(); }); },
          "Keeps what there is, and waits until it is with whoever is to have it; collective over the world.")
      .def_property_readonly(
          "sent_bytes", [](const LentParts& self) { return self.engine.sent_bytes(); },
          "What this rank has given to keepers.");
  bind_loop<LentParts>(kind);
}

void bind_pace(py::module_& module) {
  py::class_<session::KeepPace>(module, "KeepPace", "How often ranks keep versions: see lamina/session/keep_pace.h.")
      .def(py::init<std::optional<std::int64_t>>(), py::arg("every").none(true))
      .def("is_due", &session::KeepPace::is_due, py::arg("updates"), "Whether a version is to be kept after these.")
      .def(
          "note_kept",
          [](session::KeepPace& self, session::Session& session, std::int64_t updates, double took_s) {
            const auto took = std::chrono::duration_cast<base::Clock::duration>(std::chrono::duration<double>(took_s));
            self.note_kept(session, updates, base::Clock::now() - took);
          },
          py::arg("session"), py::arg("updates"), py::arg("took_s"), py::call_guard<Release>(),
          "A version is kept, in `took_s` seconds. Collective over the world where that says how often.")
      .def("go_on_from", &session::KeepPace::go_on_from, py::arg("updates"), "All go on from that version.");
}

}  // namespace

void bind_survivors(py::module_& module, py::class_<Session, std::shared_ptr<Session>>& session) {
  session
      .def("why_no_survivors", &session::why_no_survivors, py::arg("keeps_parts"),
           "Why the job cannot go on without a rank; empty where it can: see lamina/session/survivors.h.")
      .def("tell_no_survivors", &session::tell_no_survivors, py::call_guard<Release>(), py::arg("why"),
           "Tells why nobody goes on, where this rank is the first that is left.");
  module.def("key_of_parts", &session::key_of_parts, py::arg("config"),
             "The key that gives ranks parts which no other one has; empty where each has a copy of all.");
  module.def(
      "end_if_newcomer", [](const std::string& why) { outliving([&] { session::end_if_newcomer(why); }); },
      py::arg("why"), "Ends a process that was to join a job, which takes nobody in because of that: SystemExit.");
  module.def("is_leaving", &session::Doorway::leaves, "Whether SIGTERM has told this rank to leave in order.");
  module.def("end_if_told", &session::end_if_told,
             "Ends this process where SIGTERM has told it to leave: see lamina/session/doorway.h.");
  module.def("is_newcomer", &environment::is_newcomer,
             "Whether this process is to join a job, in which it is not yet.");
  bind_copies(module);
  bind_parts(module);
  bind_pace(module);
}

}  // namespace lamina::python
