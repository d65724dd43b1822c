// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/dropout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/dropout_native.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "lamina/device/capabilities.h"
#include "lamina/device/own_kernels.h"
#include "lamina/device/rank_device.h"
#include "lamina/tensor_parallel/operators.h"

namespace lamina::tensor_parallel {
namespace {

constexpr std::int64_t kHeadsAt = -3;  // of probabilities [..., heads, queries, keys]
constexpr std::int64_t kFeaturesAt = -1;

struct PartsHere {
  std::vector<SlicePart> features;
  std::optional<SlicePart> heads;
  at::Tensor given, copy;  // of layers that are given the same
  std::int64_t version = 0;
};
thread_local PartsHere parts;

// The dimension of which only a part is here, and that part.
std::optional<std::pair<std::int64_t, SlicePart>> cut_of(const at::Tensor& input) {
  if (parts.heads && input.dim() == 4 && input.size(kHeadsAt) == parts.heads->own)
    return std::pair(kHeadsAt, *parts.heads);
  for (const auto& features : parts.features) {
    if (input.dim() > 0 && input.size(-1) == features.own) return std::pair(kFeaturesAt, features);
  }
  return std::nullopt;
}

at::Tensor kept_of(const at::Tensor& input, double p, std::int64_t dim, const SlicePart& part) {
  const auto around = std::exchange(parts, {});  // what is drawn is whole
  const layout::Share here{part.first, part.first + part.own, part.own};
  auto made = dropout_of_part(input, p, dim, here, part.all);
  parts = around;
  return made;
}

at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  const auto cut = train && p > 0 ? cut_of(input) : std::nullopt;
  return cut ? kept_of(input, p, cut->first, cut->second) : at::native::dropout(input, p, train);
}

at::Tensor& dropout_in_place(at::Tensor& input, double p, bool train) {
  const auto cut = train && p > 0 ? cut_of(input) : std::nullopt;
  if (!cut) return at::native::dropout_(input, p, train);
  return input.mul_(kept_of(at::ones_like(input), p, cut->first, cut->second));
}

// Torch's own is made of other operations, so that a kernel for gradients takes its place on each device.
void replace_dropout(at::Device device) {
  static devices::OwnKernels kernels([](torch::Library& aten) {
    aten.impl("dropout", &dropout);
    aten.impl("dropout_", &dropout_in_place);
  });
  const auto backend = c10::toBackendComponent(at::TensorOptions(device).computeDispatchKey());
  kernels.add_for(c10::getAutogradKeyFromBackend(backend));
}

TORCH_LIBRARY_FRAGMENT(lamina, library) {
  library.def(
      "tp_dropout(Tensor part, float p, int dim, SymInt first, SymInt own, SymInt all) -> Tensor",
      [](const at::Tensor& part, double p, std::int64_t dim, c10::SymInt first, c10::SymInt own, c10::SymInt all) {
        return dropout_of_part(part, p, dim, std::move(first), std::move(own), std::move(all));
      },
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
}

}  // namespace

at::Tensor dropout_of_part(const at::Tensor& part, double p, std::int64_t dim, c10::SymInt first, c10::SymInt own,
                           c10::SymInt all) {
  auto shape = part.sym_sizes().vec();
  shape.at(static_cast<std::size_t>(dim < 0 ? dim + part.dim() : dim)) = std::move(all);
  const auto ones = at::ones_symint(shape, part.options().requires_grad(false));
  const auto kept = at::dropout(ones, p, /*train=*/true);
  return part * kept.narrow_symint(dim, std::move(first), std::move(own)).clone();  // the rest is not kept
}

at::Tensor dropout_of_part(const at::Tensor& part, double p, std::int64_t dim, const layout::Share& here,
                           std::int64_t all) {
  return dropout_of_part(part, p, dim, c10::SymInt(here.begin), c10::SymInt(here.count()), c10::SymInt(all));
}

void note_given(const SlicePart& features, const std::optional<SlicePart>& heads) {
  for (const auto device : {at::Device(devices::kHost), devices::rank_device()}) replace_dropout(device);
  parts.features.push_back(features);
  parts.heads = heads;
}

void note_taken() { parts = {}; }

at::Tensor copied(const at::Tensor& given, const std::string& team) {
  if (!given.requires_grad() || !at::GradMode::is_enabled()) return copy(given, team);
  const auto version = given._version();
  if (!parts.given.is_same(given) || parts.version != version) {
    parts.copy = copy(given, team);
    parts.given = given;
    parts.version = version;
  }
  return parts.copy;
}

}  // namespace lamina::tensor_parallel
