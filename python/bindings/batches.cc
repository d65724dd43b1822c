// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/batches.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/pipeline/batch_splitter.h"
#include "lamina/pipeline/outputs.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using pipeline::BatchSplitter;
using Remark = BatchSplitter::Remark;

// An object of its own to Python, not a dictionary.
struct KnownParts {
  pipeline::KnownParts parts;
};

// As tuples are shown: (4, 3), and (4,).
std::string shown(at::IntArrayRef sizes) {
  std::string text;
  for (const auto size : sizes) text += base::str(text.empty() ? "" : ", ", size);
  return base::str("(", text, sizes.size() == 1 ? ",)" : ")");
}

std::string on_lists(const std::string& argument) {
  return base::str("input_split_axes={\"", argument, "\": 0} cuts each tensor in it, non_split_inputs=[\"", argument,
                   "\"] gives it whole to each microbatch, and lamina.Microbatches(pieces) is cut already");
}

constexpr pipeline::SplitWords kWords{
    .shape = shown,
    .whole = "list the argument in non_split_inputs",
    .list = on_lists,
    .offsets =
        "list the argument in non_split_inputs, with the tensor that it points into, or give an object with a "
        "method smp_slice(num_mb, mb, axis)",
    .rows = "say so in input_split_axes",
    .nothing = "list what is to be whole in non_split_inputs",
    .otherwise = "To keep an argument whole: non_split_inputs=[\"name\"]; another axis: input_split_axes={\"name\": 1}",
    .tensor_row = "{} {}",
    .list_row = "{} ({} samples)",
    .whole_row = "{} (a list of {})",
};

void add_array(BatchSplitter& splitter, std::string name, std::vector<std::int64_t> shape, std::int64_t dtype,
               std::uintptr_t identity, const std::optional<at::Tensor>& values) {
  splitter.add_array(std::move(name), {std::move(shape), dtype, identity, values.value_or(at::Tensor())});
}

// The numbers of lists of samples, and the name of one that may be either.
std::pair<std::vector<std::size_t>, std::optional<std::string>> lists(BatchSplitter& splitter, KnownParts& known) {
  const auto found = splitter.lists(known.parts);
  if (found.not_clear) return {{}, splitter.name(*found.not_clear)};
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < found.by_elements.size(); ++i) {
    if (found.by_elements[i]) numbers.push_back(i);
  }
  return {numbers, std::nullopt};
}

std::vector<std::pair<std::int64_t, std::int64_t>> places(const BatchSplitter& splitter, std::size_t number) {
  std::vector<std::pair<std::int64_t, std::int64_t>> places;
  for (int i = 0; i < splitter.pieces().microbatches(); ++i) {
    const auto [begin, length] = splitter.piece(number, base::Microbatch(i));
    places.emplace_back(begin, length);
  }
  return places;
}

const char* word(BatchSplitter::Cut cut) {
  switch (cut) {
    case BatchSplitter::Cut::kWhole:
      return "whole";
    case BatchSplitter::Cut::kRows:
      return "rows";
    case BatchSplitter::Cut::kElements:
      return "elements";
    case BatchSplitter::Cut::kItself:
      return "itself";
    case BatchSplitter::Cut::kWithin:
      return "within";
  }
  throw base::InternalError("a cut of no kind");
}

const char* word(Remark remark) {
  if (remark == Remark::kFewer) return "fewer";
  return remark == Remark::kSplit ? "split" : "nothing";
}

std::vector<const char*> remarks(const BatchSplitter& splitter) {
  std::vector<const char*> words;
  for (const auto remark : splitter.remarks()) words.push_back(word(remark));
  return words;
}

std::string text(const BatchSplitter& splitter, std::string_view remark) {
  for (const auto each : splitter.remarks()) {
    if (word(each) == remark) return splitter.text(each);
  }
  throw base::InternalError(base::str("the text of a remark that is not made: ", remark));
}

void bind_splitter(py::module_& module) {
  py::class_<KnownParts>(module, "KnownParts",
                         "What was decided of a step function's batches: see lamina/pipeline/batch_splitter.h.")
      .def(py::init<>());
  py::class_<BatchSplitter> kind(
      module, "BatchSplitter",
      "Splits the arguments of one call of a step function: see lamina/pipeline/batch_splitter.h.");
  kind.def(py::init([](int microbatches, bool needs_all) {
             return std::make_unique<BatchSplitter>(microbatches, needs_all, kWords);
           }),
           py::arg("microbatches"), py::arg("needs_all"))
      .def("begin_argument", &BatchSplitter::begin_argument, py::arg("name"), py::arg("axis"), py::arg("is_said"))
      .def("add_tensor", &BatchSplitter::add_tensor, py::arg("name"), py::arg("tensor"))
      .def("add_array", &add_array, py::arg("name"), py::arg("shape"), py::arg("dtype"), py::arg("identity"),
           py::arg("values"))
      .def("add_self_slicing", &BatchSplitter::add_self_slicing, py::arg("name"), py::arg("type"))
      .def("add_read_once", &BatchSplitter::add_read_once, py::arg("name"), py::arg("type"))
      .def("add_packed", &BatchSplitter::add_packed, py::arg("name"), py::arg("type"))
      .def("add_other", &BatchSplitter::add_other, py::arg("name"))
      .def("begin_list", &BatchSplitter::begin_list, py::arg("name"), py::arg("size"), py::arg("is_size"),
           py::arg("identity"))
      .def("begin_container", &BatchSplitter::begin_container, py::arg("name"))
      .def("end", &BatchSplitter::end)
      .def("lists", &lists, py::arg("known"),
           "The numbers of lists of samples, and the name of one that may be either.")
      .def(
          "decide", [](BatchSplitter& splitter, KnownParts& known) { splitter.decide(known.parts); }, py::arg("known"))
      .def_property_readonly("microbatches", [](const BatchSplitter& s) { return s.pieces().microbatches(); })
      .def_property_readonly(
          "distinct", [](const BatchSplitter& s) { return s.pieces().distinct(); },
          "How many microbatches there are before the last one is repeated.")
      .def_property_readonly(
          "samples", [](const BatchSplitter& s) { return s.pieces().samples(); },
          "The samples of each microbatch; [] where nothing is cut.")
      .def(
          "cut", [](const BatchSplitter& splitter, std::size_t number) { return word(splitter.cut(number)); },
          py::arg("number"), "How a value is cut: \"whole\", \"rows\", \"elements\", \"itself\" or \"within\".")
      .def("axis", &BatchSplitter::axis, py::arg("number"))
      .def("places", &places, py::arg("number"), "Where the piece of each microbatch begins, and its length.")
      .def("remarks", &remarks, "Lists those that are to be told once: \"fewer\", \"split\", \"nothing\".")
      .def("text", &text, py::arg("remark"));
}

}  // namespace

void bind_batches(py::module_& module) {
  bind_splitter(module);
  module.def(
      "counted",
      [](const std::vector<std::int64_t>& samples, std::size_t microbatches) {
        return pipeline::counted(samples, microbatches);
      },
      py::arg("samples"), py::arg("microbatches"),
      "How many of so many microbatches are not repeated: see lamina/pipeline/pieces.h.");
  using Outputs = std::vector<at::Tensor>;
  module.def(
      "mean_of_outputs",
      [](const Outputs& outputs, const std::vector<std::int64_t>& samples) {
        return pipeline::mean_of_outputs(outputs, samples);
      },
      py::call_guard<Release>(), py::arg("outputs"), py::arg("samples"), "See lamina/pipeline/outputs.h.");
  module.def(
      "concat_outputs", [](const Outputs& outputs) { return pipeline::concat_outputs(outputs); },
      py::call_guard<Release>(), py::arg("outputs"));
  module.def(
      "stack_outputs", [](const Outputs& outputs) { return pipeline::stack_outputs(outputs); },
      py::call_guard<Release>(), py::arg("outputs"));
}

}  // namespace lamina::python
