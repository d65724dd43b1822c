// SPDX-License-Identifier: Apache-2.0
// Plans and cuts of layers: python/lamina/tensor_parallel.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/base/str.h"
#include "lamina/tensor_parallel/layer_cuts.h"
#include "lamina/tensor_parallel/plans.h"
#include "lamina/tensor_parallel/team.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using tensor_parallel::LayerCut;
using tensor_parallel::LayerKind;
using tensor_parallel::ModelModule;
using tensor_parallel::ParentCut;
using tensor_parallel::ParentModule;
using tensor_parallel::PlannedLayer;
using tensor_parallel::SlicePart;
using tensor_parallel::Styles;
using SectionRows = std::vector<std::pair<std::int64_t, std::int64_t>>;
using SliceRow = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // own, first, all

SliceRow to_row(const SlicePart& part) { return {part.own, part.first, part.all}; }

std::optional<SliceRow> to_row(const std::optional<SlicePart>& part) {
  return part ? std::optional(to_row(*part)) : std::nullopt;
}

SectionRows to_rows(const std::vector<layout::Section>& sections) {
  SectionRows rows;
  for (const auto& section : sections) rows.emplace_back(section.extent, section.unit);
  return rows;
}

std::vector<std::pair<std::string, std::pair<int, SectionRows>>> slices_of(const LayerCut& cut) {
  std::vector<std::pair<std::string, std::pair<int, SectionRows>>> slices;
  for (const auto& [name, slicing] : cut.slices) {
    slices.emplace_back(name, std::pair(slicing.dim, to_rows(slicing.sections)));
  }
  return slices;
}

std::vector<std::pair<std::size_t, std::optional<SliceRow>>> members_of(const ParentCut& cut) {
  std::vector<std::pair<std::size_t, std::optional<SliceRow>>> members;
  for (const auto& member : cut.members) members.emplace_back(member.row, to_row(member.gives));
  return members;
}

void bind_model_modules(py::module_& module) {
  py::class_<ModelModule>(module, "ModelModule")
      .def(py::init([](std::string type, std::vector<std::string> classes) {
             ModelModule row;
             row.type = std::move(type);
             row.classes = std::move(classes);
             return row;
           }),
           py::arg("type"), py::arg("classes"))
      .def_readwrite("parameters", &ModelModule::parameters)
      .def_readwrite("in_features", &ModelModule::in_features)
      .def_readwrite("reaches_base", &ModelModule::reaches_base)
      .def_readwrite("has_variant", &ModelModule::has_variant)
      .def_readwrite("wrapped", &ModelModule::wrapped)
      .def_readwrite("is_marked", &ModelModule::is_marked)
      .def_readwrite("is_replaced", &ModelModule::is_replaced)
      .def_readwrite("plan", &ModelModule::plan)
      .def_readwrite("transformers_plan", &ModelModule::transformers_plan)
      .def_readwrite("own_style", &ModelModule::own_style)
      .def(
          "set_heads",
          [](ModelModule& self, std::string name, std::int64_t count) { self.heads = {std::move(name), count}; },
          py::arg("name"), py::arg("count"))
      .def(
          "set_own_plan",
          [](ModelModule& self, Styles styles, Styles in_parts, bool is_stack) {
            self.own_plan = {std::move(styles), std::move(in_parts), is_stack};
          },
          py::arg("styles"), py::arg("in_parts"), py::arg("is_stack"));
}

void bind_planned(py::module_& module) {
  py::enum_<LayerKind>(module, "LayerKind")
      .value("OTHER", LayerKind::kOther)
      .value("LINEAR", LayerKind::kLinear)
      .value("CONV1D", LayerKind::kConv1d)
      .value("EMBEDDING", LayerKind::kEmbedding);
  py::class_<ParentModule>(module, "ParentModule").def_readwrite("numbers", &ParentModule::numbers);
  py::class_<PlannedLayer>(module, "PlannedLayer")
      .def_readonly("name", &PlannedLayer::name)
      .def_readonly("kind", &PlannedLayer::kind)
      .def_readonly("layer", &PlannedLayer::layer)
      .def_readonly("member", &PlannedLayer::member)
      .def_readonly("parent", &PlannedLayer::parent)
      .def_readwrite("shape", &PlannedLayer::shape)
      .def_readwrite("has_bias", &PlannedLayer::has_bias)
      .def_readwrite("has_own_forward", &PlannedLayer::has_own_forward)
      .def_readwrite("has_options", &PlannedLayer::has_options)
      .def_readwrite("padding", &PlannedLayer::padding)
      .def_property_readonly("said_heads", [](const PlannedLayer& self) { return self.heads ? self.heads->name : ""; })
      .def(
          "set_said_heads", [](PlannedLayer& self, std::int64_t count) { self.heads->count = count; },
          py::arg("count"));
}

// A team of a plan, by its name. Another one's is another: Python may free them late.
struct LoneTeam {
  explicit LoneTeam(int size) { tensor_parallel::note_team(name, std::make_shared<tensor_parallel::Team>(size)); }
  ~LoneTeam() { tensor_parallel::forget_team(name); }
  LoneTeam(const LoneTeam&) = delete;
  const std::string name = base::str("of the plan at ", static_cast<const void*>(this));
};

struct PythonAlone {
  std::optional<tensor_parallel::Alone> here;
};

void bind_alone(py::module_& module) {
  py::class_<PythonAlone>(
      module, "Alone",
      "A context of a trace, in which collectives of sliced layers take this rank's part for that of each.")
      .def(py::init<>())
      .def("__enter__", [](PythonAlone& self) { self.here.emplace(); })
      .def("__exit__", [](PythonAlone& self, const py::args&) { self.here.reset(); });
  py::class_<LoneTeam>(module, "LoneTeam",
                       "The first of so many ranks that layers are cut over, without the others: for a trace.")
      .def(py::init<int>(), py::arg("size"))
      .def_readonly("name", &LoneTeam::name, "By it operators of slices find the team.");
  module.def("is_alone", &tensor_parallel::Alone::here, "True in an `Alone` of this thread.");
  module.def(
      "team_size", [](const std::string& team) { return tensor_parallel::find_team(team)->size(); }, py::arg("team"));
}

}  // namespace

void bind_tensor_parallel(py::module_& module) {
  bind_alone(module);
  bind_model_modules(module);
  bind_planned(module);
  py::class_<LayerCut>(module, "LayerCut")
      .def_readonly("name", &LayerCut::name)
      .def_readonly("style", &LayerCut::style)
      .def_property_readonly("slices", &slices_of)
      .def_readonly("sizes", &LayerCut::sizes)
      .def_property_readonly("part", [](const LayerCut& self) { return to_row(self.part); })
      .def_readonly("chosen", &LayerCut::chosen)
      .def_property_readonly("sections", [](const LayerCut& self) { return to_rows(self.sections); })
      .def_readonly("by_parent", &LayerCut::by_parent)
      .def_readonly("padding", &LayerCut::padding)
      .def_readonly("numbers", &LayerCut::numbers);
  py::class_<ParentCut>(module, "ParentCut")
      .def_readonly("parent", &ParentCut::parent)
      .def_property_readonly("members", &members_of)
      .def_property_readonly("heads", [](const ParentCut& self) { return to_row(self.heads); })
      .def_readonly("own_keys", &ParentCut::own_keys)
      .def_readonly("keys", &ParentCut::keys)
      .def_readonly("numbers", &ParentCut::numbers);
  module.def(
      "plan_layers",
      [](std::vector<ModelModule> modules, std::vector<std::pair<std::string, std::size_t>> names, int degree,
         bool in_parts) {
        auto planned = tensor_parallel::plan_layers({std::move(modules), std::move(names)}, degree, in_parts);
        return std::tuple(std::move(planned.parents), std::move(planned.layers), std::move(planned.elsewhere),
                          std::move(planned.tied));
      },
      py::arg("modules"), py::arg("names"), py::arg("degree"), py::arg("in_parts"),
      "The modules around layers that are to be sliced, these layers, those that are elsewhere, too, and the names of "
      "tied parameters. UsageError where a plan names what is not there.");
  module.def(
      "marked_but_whole",
      [](std::vector<ModelModule> modules, std::vector<std::pair<std::string, std::size_t>> names,
         const std::set<std::string>& sliced) {
        return tensor_parallel::marked_but_whole({std::move(modules), std::move(names)}, sliced);
      },
      py::arg("modules"), py::arg("names"), py::arg("sliced"),
      "The classes of marked modules with parameters of their own that are no sliced layers.");
  module.def(
      "cut_layers",
      [](std::map<std::size_t, ParentModule> parents, std::vector<PlannedLayer> layers,
         std::vector<PlannedLayer> elsewhere, std::vector<std::vector<std::string>> tied, int degree, int member) {
        const tensor_parallel::PlannedLayers planned{std::move(parents), std::move(layers), std::move(elsewhere),
                                                     std::move(tied)};
        auto cuts = tensor_parallel::cut_layers(planned, degree, member);
        return std::pair(std::move(cuts.layers), std::move(cuts.parents));
      },
      py::arg("parents"), py::arg("layers"), py::arg("elsewhere"), py::arg("tied"), py::arg("degree"),
      py::arg("member"),
      "The cuts for one of so many members of a team. UsageError where sizes do not allow what the plan asks for.");
}

}  // namespace lamina::python
