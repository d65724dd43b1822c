// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <rapidcheck.h>

#include <string>

#include "lamina/archive/manifest.h"
#include "tests/layout/any_layout.h"

// Random manifests that hold what a manifest promises.
namespace lamina::archive::testing {

inline std::string any_name() {
  return *rc::gen::container<std::string>(rc::gen::elementOf(std::string("ab.\"\\/\n 0_")));
}

// The pieces of a random layout, without padding, one behind the other in random files.
inline SavedTensor any_tensor(const std::string& name, std::vector<DataFile>& files) {
  const auto shape = layout::any_shape();
  auto parameter = layout::any_layout(shape);
  if (parameter.slicing) parameter.slicing->padded = false;
  SavedTensor tensor{
      .name = name,
      .kind = *rc::gen::element(Kind::kParameter, Kind::kBuffer, Kind::kMaster, Kind::kState, Kind::kContent),
      .dtype = static_cast<layout::DType>(*rc::gen::inRange(0, 24)),
      .shape = shape};
  if (tensor.kind == Kind::kState) tensor.state = "exp_avg";
  if (tensor.kind == Kind::kState || tensor.kind == Kind::kMaster) tensor.optimizer = *rc::gen::inRange(0, 3);
  if (*rc::gen::arbitrary<bool>()) tensor.also = {name + "'", name + "\""};
  for (const auto& piece : layout::pieces(parameter)) {
    auto region = piece.region;
    region.size = region.end - region.begin;
    if (region.size == 0 && layout::numel(shape) > 0) continue;
    const auto file = *rc::gen::inRange<std::size_t>(0, files.size());
    tensor.pieces.push_back({file, files[file].bytes, region});
    files[file].bytes += static_cast<std::uint64_t>(region.size * traits(tensor.dtype).size_bytes);
  }
  return tensor;
}

inline Manifest any_manifest() {
  Manifest manifest{.id = any_name(), .number = *rc::gen::inRange<std::int64_t>(0, 1'000'000'000'000)};
  for (int i = *rc::gen::inRange(1, 4); i > 0; --i) manifest.files.push_back({"f" + std::to_string(i), 8, {}});
  const auto count = *rc::gen::inRange(0, 6);
  for (int i = 0; i < count; ++i) {
    manifest.tensors.push_back(any_tensor(std::to_string(i) + any_name(), manifest.files));
  }
  for (auto& file : manifest.files) {
    for (std::uint64_t at = 0; at < file.bytes; at += kBlock) file.checksums.push_back(at * 0x9e3779b97f4a7c15ULL);
  }
  manifest.about = {{"a", any_name()}, {"kind", {1, -2, 0.1, nullptr, true, {{"files", {1, 2}}}}}};
  return manifest;
}

}  // namespace lamina::archive::testing
