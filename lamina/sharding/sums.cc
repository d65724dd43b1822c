// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/sums.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <map>
#include <tuple>

namespace lamina::sharding {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes

// All parameters whose sums lie in one piece.
struct Piece {
  std::vector<std::size_t> parameters;
  std::vector<std::int64_t> begins;  // elements
  std::int64_t numel = 0;
};

}  // namespace

Sums::Sums(std::span<const Spec> parameters, int members) : memory_(parameters.size()) {
  std::map<std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType>, Piece> pieces;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& each = parameters[i];
    auto& piece = pieces[{each.device.type(), each.device.index(), each.sum_type()}];
    const auto unit = kAlignment / static_cast<std::int64_t>(c10::elementSize(each.sum_type()));
    piece.parameters.push_back(i);
    piece.begins.push_back(piece.numel);
    piece.numel += (each.shard_numel(members) + unit - 1) / unit * unit;
  }
  for (const auto& [kind, piece] : pieces) {
    const auto& first = parameters[piece.parameters.front()];
    const auto all = at::empty({piece.numel}, at::TensorOptions(first.sum_type()).device(first.device));
    for (std::size_t i = 0; i < piece.parameters.size(); ++i) {
      const auto parameter = piece.parameters[i];
      const auto part = all.narrow(0, piece.begins[i], parameters[parameter].shard_numel(members));
      // A storage of its own: how many have it says whether it is in use.
      memory_[parameter] = at::from_blob(part.mutable_data_ptr(), part.sizes(), [all](void*) {}, part.options());
    }
  }
}

at::Tensor Sums::take(std::size_t parameter) {
  const auto& memory = memory_.at(parameter);
  if (memory.storage().use_count() > 1) return at::empty_like(memory);
  return at::empty({0}, memory.options()).set_(memory.storage(), 0, memory.sizes());
}

}  // namespace lamina::sharding
