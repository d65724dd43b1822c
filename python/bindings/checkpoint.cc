// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/archive/model_folder.h"
#include "lamina/archive/store.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/piece_reader.h"
#include "lamina/checkpoint/save.h"
#include "lamina/checkpoint/snapshot.h"
#include "lamina/checkpoint/tree_json.h"
#include "lamina/session/checkpoint_parts.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"

namespace lamina::python {
namespace {

using archive::Kind;
using archive::SavedTensor;
using checkpoint::Part;
using session::CheckpointParts;
using session::OptimizerSteps;
using session::Session;
using Release = py::gil_scoped_release;

constexpr auto kContent = "content/";

// A state that belongs to what stands in an optimizer's groups, as Python names it.
struct StateName {
  int optimizer;
  std::string state;  // "" of a master
  std::string parameter;
};

SavedTensor named(const StateName& of, layout::Shape shape) {
  SavedTensor tensor;
  tensor.name = of.parameter;
  tensor.kind = of.state.empty() ? Kind::kMaster : Kind::kState;
  tensor.optimizer = of.optimizer;
  tensor.state = of.state;
  tensor.shape = std::move(shape);
  return tensor;
}

// The parts that a rank writes, as Python lists them.
class PartsToSave {
 public:
  explicit PartsToSave(const CheckpointParts& parts) : parts_(parts) {}

  // `elements`: all that this rank has of it.
  void add_row(const std::string& name, const at::Tensor& elements, std::vector<std::string> also) {
    const auto* row = parts_.table().find(name);
    base::internal_check(row != nullptr, "a part of no row");
    auto place = parts_.of_row(*row);
    SavedTensor tensor;
    tensor.name = name;
    tensor.kind = row->layout.buffer ? Kind::kBuffer : Kind::kParameter;
    tensor.shape = std::move(place.shape);
    tensor.also = std::move(also);
    add(std::move(tensor), std::move(place.region), place.writes, elements);
  }

  void add_state(const OptimizerSteps& steps, const StateName& of, const at::Tensor& place, const at::Tensor& value) {
    auto where = of.state.empty() ? parts_.of_place(steps, place, of.parameter)
                                  : parts_.of_state(steps, place, of.parameter, value.sizes());
    add(named(of, std::move(where.shape)), std::move(where.region), where.writes, value);
  }

  void add_content(const std::string& name, const at::Tensor& value) {
    to_write_.push_back(checkpoint::whole_part(name, Kind::kContent, value));
  }

  std::vector<Part> take() { return std::move(to_write_); }

 private:
  void add(SavedTensor tensor, layout::Region region, bool writes, const at::Tensor& elements) {
    tensor.dtype = checkpoint::savable_dtype(elements, archive::describe(tensor));
    if (!writes) return;
    auto own = elements.detach();
    to_write_.push_back({std::move(tensor), std::move(region), own.is_contiguous() ? own : own.contiguous()});
  }

  const CheckpointParts& parts_;
  std::vector<Part> to_write_;
};

archive::Store::Form form_of(bool partial) {
  return partial ? archive::Store::Form::kPartial : archive::Store::Form::kFull;
}

// Throws what keeps an object from being saved.
void require_content(py::handle object, bool allow_objects) {
  std::vector<at::Tensor> tensors;
  checkpoint::to_json(to_value(object), tensors, allow_objects);
  for (const auto& tensor : tensors) checkpoint::savable_dtype(tensor, "a tensor of user_content");
}

// Ends a save that Python lets go of: its thread may need the GIL, to let go of what it holds.
struct EndWithoutGil {
  void operator()(checkpoint::Save* save) const {
    const Release release;
    delete save;
  }
};
using SaveHolder = std::unique_ptr<checkpoint::Save, EndWithoutGil>;

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
    for (std::size_t i = 0; i < tensors.size(); ++i) parts.add_content(base::str(kContent, i), tensors[i]);
  }
  request.parts = parts.take();
  const Release release;
  auto save =
      std::make_unique<checkpoint::Save>(archive::file_system(), std::move(request), session::peers_of(session));
  save->start(snapshot);
  return SaveHolder(save.release());
}

// A checkpoint that is read: what is wanted of it is listed first, and then read at once.
class CheckpointReader {
 public:
  CheckpointReader(const std::filesystem::path& place, bool verify)
      : reader_(archive::file_system(), place, manifest_at(place), verify) {}

  const archive::Manifest& manifest() const { return reader_.manifest(); }

  py::object about(const std::string& key, bool allow_objects) const {
    const auto& about = manifest().about;
    if (!about.contains(key)) return py::none();
    const auto tensor = [&](std::size_t number) {
      const auto name = base::str(kContent, number);
      const auto* found = reader_.find(name, Kind::kContent);
      if (found == nullptr) throw base::FormatError(base::str(place(), ": ", name, " is missing"));
      return reader_.read(*found);
    };
    return to_object(checkpoint::to_value(about[key], tensor, allow_objects));
  }

  // (shape, dtype) of a tensor; none where it is not there.
  py::object find(const std::string& name, Kind kind, int optimizer, const std::string& state) const {
    const auto* found = reader_.find(name, kind, optimizer, state);
    if (found == nullptr) return py::none();
    return py::make_tuple(py::tuple(py::cast(found->shape)), checkpoint::scalar_type(found->dtype));
  }

  // Memory that read() fills with this rank's elements.
  at::Tensor want_row(const CheckpointParts& parts, const std::string& name, Kind from, int optimizer) {
    const auto* row = parts.table().find(name);
    base::internal_check(row != nullptr, "a part of no row");
    return want(name, from, optimizer, "", parts.of_row(*row).region);
  }
  at::Tensor want_state(const CheckpointParts& parts, const OptimizerSteps& steps, const StateName& of,
                        const at::Tensor& place, Kind from) {
    const int optimizer = from == Kind::kParameter ? 0 : of.optimizer;
    const auto* found = reader_.find(of.parameter, from, optimizer, from == Kind::kState ? of.state : "");
    base::internal_check(found != nullptr, "a part of nothing");
    // A state like the parameter is here as its place is.
    const auto* row = parts.table().find(of.parameter);
    const bool is_like = row != nullptr && row->layout.shape == found->shape && !found->shape.empty();
    const bool is_owned = !of.state.empty() && steps.updates_whole(place);
    const auto sizes = is_like && !is_owned ? place.sizes() : at::IntArrayRef(found->shape);
    const auto where = of.state.empty() ? parts.of_place(steps, place, of.parameter)
                                        : parts.of_state(steps, place, of.parameter, sizes);
    return want(of.parameter, from, optimizer, found->state, where.region).view(sizes);
  }
  at::Tensor want_content(const std::string& name) {
    const auto* found = reader_.find(name, Kind::kContent);
    return found == nullptr ? at::Tensor()
                            : want(name, Kind::kContent, 0, "", layout::whole(found->shape)).view(found->shape);
  }

  at::Tensor whole(const std::string& name) const {
    const auto* found = reader_.find(name, Kind::kParameter);
    base::internal_check(found != nullptr, "all of nothing");
    const Release release;
    return reader_.read(*found);
  }

  void read(const Session& session) {
    const Release release;
    const auto patience = session.patience();
    reader_.read(wanted_, [&] {
      if (patience.check_interrupt) patience.check_interrupt();
    });
    wanted_.clear();
  }

 private:
  static archive::Manifest manifest_at(const std::filesystem::path& place) {
    auto& files = archive::file_system();
    if (std::filesystem::exists(place / archive::kManifestName)) return archive::read_checkpoint(files, place);
    return archive::read_model_folder(files, place);
  }

  std::string place() const { return reader_.folder().string(); }

  at::Tensor want(const std::string& name, Kind kind, int optimizer, const std::string& state,
                  const layout::Region& region) {
    const auto* found = reader_.find(name, kind, optimizer, state);
    base::internal_check(found != nullptr, "a part of nothing");
    if (found->shape != region.whole) {
      throw base::UsageError(base::str(archive::describe(*found), " has another shape in ", place()));
    }
    const auto type = checkpoint::scalar_type(found->dtype);
    const bool padded = region.size > checkpoint::count(region);
    auto into = padded ? at::zeros({region.size}, type) : at::empty({region.size}, type);
    wanted_.push_back({found, region, into});
    return into;
  }

  checkpoint::PieceReader reader_;
  std::vector<checkpoint::Wanted> wanted_;
};

// (folder, id) of the checkpoint that is to be loaded; none where there is none. A whole model may be one of others, of
// no id.
py::object find_checkpoint(const std::filesystem::path& folder, const std::optional<std::string>& tag, bool partial,
                           const std::function<void(const std::string&)>& tells) {
  auto& files = archive::file_system();
  if (!partial) {
    const auto place = tag ? folder / *tag : folder;
    const bool is_checkpoint = std::filesystem::exists(place / archive::kManifestName);
    if (is_checkpoint) return py::make_tuple(place.string(), archive::read_checkpoint(files, place).id);
    if (archive::is_model_folder(files, place)) return py::make_tuple(place.string(), "");
  }
  archive::Store store(files, folder, form_of(partial));
  std::optional<archive::Found> found;
  if (tag) {
    found = store.find(*tag);
  } else {
    found = store.newest(tells);
  }
  if (!found) return py::none();
  return py::make_tuple(found->folder.string(), found->manifest.id);
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
      .def("add_state", &PartsToSave::add_state, py::arg("steps"), py::arg("of"), py::arg("place"), py::arg("value"))
      .def("add_content", &PartsToSave::add_content, py::arg("name"), py::arg("value"));
  py::class_<checkpoint::Snapshot>(module, "Snapshot").def(py::init<>());
  py::class_<checkpoint::Save, SaveHolder>(module, "Save")
      .def_property_readonly("is_over", &checkpoint::Save::is_over)
      .def_property_readonly("tag", &checkpoint::Save::tag)
      .def("give_up", &checkpoint::Save::give_up)
      .def("wait", &checkpoint::Save::wait, py::call_guard<Release>());
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
      .def("about", &CheckpointReader::about, py::arg("key"), py::arg("allow_objects"))
      .def("find", &CheckpointReader::find, py::arg("name"), py::arg("kind"), py::arg("optimizer") = 0,
           py::arg("state") = "")
      .def("want_row", &CheckpointReader::want_row, py::arg("parts"), py::arg("name"), py::arg("kind"),
           py::arg("optimizer") = 0)
      .def("want_state", &CheckpointReader::want_state, py::arg("parts"), py::arg("steps"), py::arg("of"),
           py::arg("place"), py::arg("kind"))
      .def("want_content", &CheckpointReader::want_content, py::arg("name"))
      .def("whole", &CheckpointReader::whole, py::arg("name"))
      .def("read", &CheckpointReader::read, py::arg("session"));
  module.def("find_checkpoint", &find_checkpoint, py::arg("folder"), py::arg("tag").none(true), py::arg("partial"),
             py::arg("tells"));
}

}  // namespace lamina::python
