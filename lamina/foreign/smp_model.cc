// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/smp_model.h"

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/foreign/plain_values.h"
#include "lamina/foreign/tensor_parts.h"

namespace lamina::foreign {

using archive::Kind;
using archive::SavedTensor;
using nlohmann::json;

std::optional<std::string> module_of_extra(const std::string& name) {
  constexpr std::string_view kExtra = "_extra_state";
  if (name == kExtra) return "";
  if (!name.ends_with(base::str(".", kExtra))) return std::nullopt;
  return name.substr(0, name.size() - kExtra.size() - 1);
}

void SmpModel::read_slicings(const json& cuts, int degree) {
  for (const auto& [name, cut] : pairs_of(cuts)) {
    auto& slicing = slicings_[name];
    slicing.dim = cut.at(0).get<int>();
    for (const auto& section : cut.at(1)) slicing.sections.push_back({section.at(0), section.at(1)});
    slicing.degree = degree;
  }
}

const layout::Slicing* SmpModel::slicing_of(const SavedTensor& tensor) const {
  auto found = slicings_.find(tensor.name);
  for (const auto& name : tensor.also) found = found == slicings_.end() ? slicings_.find(name) : found;
  return found == slicings_.end() ? nullptr : &found->second;
}

void SmpModel::add(SavedTensor tensor, int slice) {
  if (const auto* slicing = slicing_of(tensor)) return add_of_slice(tensor, *slicing, slice);
  auto names = std::move(tensor.also);
  names.insert(names.begin(), tensor.name);
  std::erase_if(names, [&](const auto& name) {
    const auto module = module_of_extra(name);
    if (!module) return false;
    auto content = tensor;
    content.kind = Kind::kContent;
    content.name = base::str("content/", contents_);
    content.also.clear();
    found_.about["extra_state"][*module] = {{"tensor", contents_++}};
    found_.tensors.push_back(std::move(content));
    return true;
  });
  if (names.empty()) return;
  tensor.name = names.front();
  tensor.also.assign(names.begin() + 1, names.end());
  add_whole(std::move(tensor));
}

void SmpModel::add_of_slice(const SavedTensor& tensor, const layout::Slicing& slicing, int slice) {
  const auto known = names_.find(tensor.name);
  auto* whole = known == names_.end() ? nullptr : &found_.tensors[known->second];
  if (whole == nullptr) {
    auto first = tensor;
    first.pieces.clear();
    auto& extent = first.shape.at(static_cast<std::size_t>(slicing.dim)) = 0;
    for (const auto& section : slicing.sections) extent += section.extent;
    add_whole(std::move(first));
    whole = &found_.tensors.back();
  }
  if (!add_slice(*whole, slicing, slice, {&tensor, 1})) refuse_slice(tensor, slice);
}

void SmpModel::refuse_slice(const SavedTensor& tensor, int slice) const {
  throw base::FormatError(base::str(found_.folder.string(), ": ", describe(tensor), " has not the elements of slice ",
                                    slice, ": the file of a rank is missing, or another job's"));
}

void SmpModel::add_whole(SavedTensor tensor) {
  auto names = std::move(tensor.also);
  names.insert(names.begin(), tensor.name);
  const auto known = std::ranges::find_if(names, [&](const auto& name) { return names_.contains(name); });
  if (known == names.end()) {
    tensor.also.assign(names.begin() + 1, names.end());
    for (const auto& name : names) names_.emplace(name, found_.tensors.size());
    found_.tensors.push_back(std::move(tensor));
    return;
  }
  const auto place = names_.find(*known)->second;
  auto& same = found_.tensors[place];
  if (same.shape != tensor.shape || same.dtype != tensor.dtype) {
    throw base::FormatError(base::str(found_.folder.string(), ": ", *known, " has another shape or dtype in ",
                                      file_of(tensor), " than in ", file_of(same)));
  }
  for (const auto& name : names) {
    if (names_.emplace(name, place).second) same.also.push_back(name);
  }
}

std::string SmpModel::file_of(const SavedTensor& tensor) const {
  return tensor.pieces.empty() ? "a file" : found_.files[tensor.pieces[0].file].name;
}

void SmpModel::name_buffers(const json* names) {
  if (names == nullptr || !names->is_array()) return;
  const std::set<json> buffers(names->begin(), names->end());
  for (auto& tensor : found_.tensors) {
    if (buffers.contains(tensor.name)) tensor.kind = Kind::kBuffer;
  }
}

const SavedTensor* SmpModel::find(std::string_view name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : &found_.tensors[found->second];
}

std::optional<SavedTensor> SmpModel::add_flat(const std::string& name, SavedTensor tensor) {
  tensor.name = name;
  const auto [known, fresh] = names_.try_emplace(name, found_.tensors.size());
  if (fresh) {
    found_.tensors.push_back(std::move(tensor));
    return std::nullopt;
  }
  auto& here = found_.tensors[known->second];
  tensor.name = here.name;
  if (here.shape == tensor.shape) return here.dtype == tensor.dtype ? std::nullopt : std::optional(std::move(tensor));
  tensor.also = std::move(here.also);
  here = std::move(tensor);
  return std::nullopt;
}

void SmpModel::leave_placeholders(const std::set<std::string>& cut) {
  std::erase_if(found_.tensors, [&](const auto& tensor) {
    const bool left = tensor.kind == Kind::kParameter && tensor.shape == layout::Shape{0} && !cut.contains(tensor.name);
    if (left) found_.left.push_back({tensor.name, std::nullopt});
    return left;
  });
  names_.clear();
  for (std::size_t place = 0; place < found_.tensors.size(); ++place) {
    names_.emplace(found_.tensors[place].name, place);
    for (const auto& name : found_.tensors[place].also) names_.emplace(name, place);
  }
}

}  // namespace lamina::foreign
