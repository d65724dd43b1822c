// SPDX-License-Identifier: Apache-2.0
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/archive/store.h"
#include "lamina/checkpoint/save.h"
#include "lamina/checkpoint/snapshot.h"
#include "lamina/checkpoint/tree_json.h"
#include "lamina/session/checkpoint_reader.h"
#include "lamina/session/parts_to_save.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"
#include "python/bindings/save_holder.h"

namespace lamina::python {
namespace {

using archive::Kind;
using session::CheckpointParts;
using session::CheckpointReader;
using session::PartsToSave;
using session::Session;
using session::StateName;
using Release = py::gil_scoped_release;

archive::Store::Form form_of(bool partial) {
  return partial ? archive::Store::Form::kPartial : archive::Store::Form::kFull;
}

// Throws what keeps an object from being saved.
void require_content(py::handle object, bool allow_objects) {
  std::vector<at::Tensor> tensors;
  checkpoint::to_json(to_value(object), tensors, allow_objects);
  for (const auto& tensor : tensors) checkpoint::savable_dtype(tensor, "a tensor of user_content");
}

// A save under way; training may go on where it has a snapshot.
SaveHolder begin_save(Session& session, PartsToSave& parts, const std::filesystem::path& folder, const std::string& tag,
                      bool partial, const py::dict& about, bool allow_objects, std::map<std::string, std::string> texts,
                      std::size_t keep, checkpoint::Snapshot* snapshot) {
  checkpoint::SaveRequest request{.folder = folder, .tag = tag, .texts = std::move(texts), .keep = keep};
  request.form = form_of(partial);
  request.about = nlohmann::json::object();
  std::vector<at::Tensor> tensors;
  for (const auto& [key, value] : about) {
    request.about[key.cast<std::string>()] = checkpoint::to_json(to_value(value), tensors, allow_objects);
  }
  if (session.world().rank == base::Rank(0)) {
    for (std::size_t i = 0; i < tensors.size(); ++i) parts.add_content(session::content_name(i), tensors[i]);
  }
  request.parts = parts.take();
  const Release release;
  auto save =
      std::make_unique<checkpoint::Save>(archive::file_system(), std::move(request), session::peers_of(session));
  save->start(snapshot);
  return SaveHolder(save.release());
}

// (shape, dtype) of a tensor; none where it is not there.
py::object find(const CheckpointReader& reader, const std::string& name, Kind kind, int optimizer,
                const std::string& state) {
  const auto* found = reader.find(name, kind, optimizer, state);
  if (found == nullptr) return py::none();
  return py::make_tuple(py::tuple(py::cast(found->shape)), checkpoint::scalar_type(found->dtype));
}

// (folder, id, tag) of the checkpoint that is to be loaded; none where there is none.
py::object find_checkpoint(const std::filesystem::path& folder, const std::optional<std::string>& tag, bool partial,
                           const std::function<void(const std::string&)>& tells) {
  const auto found = session::find_checkpoint(folder, tag, form_of(partial), tells);
  return found ? py::make_tuple(found->folder.string(), found->id, found->tag) : py::object(py::none());
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  py::enum_<Kind>(module, "SavedKind")
      .value("PARAMETER", Kind::kParameter)
      .value("BUFFER", Kind::kBuffer)
      .value("MASTER", Kind::kMaster)
      .value("STATE", Kind::kState)
      .value("CONTENT", Kind::kContent);
  py::class_<StateName>(module, "StateName")
      .def(py::init<int, std::string, std::string>(), py::arg("optimizer"), py::arg("state"), py::arg("parameter"));
  py::class_<CheckpointParts>(module, "CheckpointParts")
      .def(py::init<const Session&, const model::ParameterTable&>(), py::arg("session"), py::arg("table"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>());
  py::class_<PartsToSave>(module, "PartsToSave")
      .def(py::init<const CheckpointParts&>(), py::arg("parts"), py::keep_alive<1, 2>())
      .def("add_row", &PartsToSave::add_row, py::arg("name"), py::arg("elements"), py::arg("also"))
      .def("add_state", &PartsToSave::add_state, py::arg("locals"), py::arg("of"), py::arg("place"), py::arg("value"))
      .def("add_content", &PartsToSave::add_content, py::arg("name"), py::arg("value"));
  py::class_<checkpoint::Snapshot>(module, "Snapshot").def(py::init<>());
  py::class_<checkpoint::Save, SaveHolder>(module, "Save")
      .def_property_readonly("is_over", &checkpoint::Save::is_over)
      .def_property_readonly("tag", &checkpoint::Save::tag)
      .def("give_up", &checkpoint::Save::give_up)
      .def("wait", &checkpoint::Save::wait, py::call_guard<Release>())
      .def("end", &checkpoint::Save::end, py::call_guard<Release>())
      .def("check_before_step", &checkpoint::Save::check_before_step, py::call_guard<Release>());
  module.def("require_content", &require_content, py::arg("object"), py::arg("allow_objects"));
  module.def("begin_save", &begin_save, py::arg("session"), py::arg("parts"), py::arg("folder"), py::arg("tag"),
             py::arg("partial"), py::arg("about"), py::arg("allow_objects"), py::arg("texts"), py::arg("keep"),
             py::arg("snapshot").none(true), py::keep_alive<0, 1>());
  py::class_<CheckpointReader>(module, "CheckpointReader")
      .def(py::init<const std::filesystem::path&, bool>(), py::arg("place"), py::arg("verify"))
      .def_property_readonly("id", [](const CheckpointReader& reader) { return reader.manifest().id; })
      .def_property_readonly("tensors",
                             [](const CheckpointReader& reader) {
                               py::list all;
                               for (const auto& each : reader.manifest().tensors) {
                                 all.append(py::make_tuple(each.name, each.kind, each.optimizer, each.state));
                               }
                               return all;
                             })
      .def(
          "about",
          [](const CheckpointReader& reader, const std::string& key, bool allow_objects) {
            return to_object(reader.about(key, allow_objects));
          },
          py::arg("key"), py::arg("allow_objects"))
      .def("find", &find, py::arg("name"), py::arg("kind"), py::arg("optimizer") = 0, py::arg("state") = "")
      .def(
          "saved_name",
          [](const CheckpointReader& reader, const std::vector<std::string>& names) -> std::optional<std::string> {
            const auto* name = reader.saved_name(names);
            return name == nullptr ? std::nullopt : std::optional(*name);
          },
          py::arg("names"))
      .def("check_model", &CheckpointReader::check_model, py::arg("model"), py::arg("strict"))
      .def("best_source", &CheckpointReader::best_source, py::arg("name"), py::arg("dtype"))
      .def("want_row", &CheckpointReader::want_row, py::arg("parts"), py::arg("name"), py::arg("kind"),
           py::arg("optimizer"), py::arg("into"))
      .def("want_master", &CheckpointReader::want_master, py::arg("parts"), py::arg("of"), py::arg("into"))
      .def("want_state", &CheckpointReader::want_state, py::arg("parts"), py::arg("locals"), py::arg("of"),
           py::arg("place"), py::arg("held").none(true))
      .def("want_content", &CheckpointReader::want_content, py::arg("name"))
      .def("whole", &CheckpointReader::whole, py::arg("name"), py::call_guard<Release>())
      .def("check_share", &CheckpointReader::check_share, py::arg("session"), py::call_guard<Release>())
      .def("read", &CheckpointReader::read, py::arg("session"), py::call_guard<Release>())
      .def("fill_model", &CheckpointReader::fill_model, py::arg("session"), py::call_guard<Release>())
      .def("fill_optimizers", &CheckpointReader::fill_optimizers, py::arg("session"), py::call_guard<Release>());
  module.def(
      "checkpoint_before",
      [](const std::filesystem::path& folder, const std::string& tag) {
        return archive::Store(archive::file_system(), folder).before(tag);
      },
      py::arg("folder"), py::arg("tag"));
  module.def("find_checkpoint", &find_checkpoint, py::arg("folder"), py::arg("tag").none(true), py::arg("partial"),
             py::arg("tells"));
}

}  // namespace lamina::python
