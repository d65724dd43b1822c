// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>

#include "lamina/base/str.h"
#include "lamina/dist/current.h"
#include "lamina/dist/dist.h"
#include "lamina/dist/errors.h"
#include "lamina/value/encoding.h"

namespace lamina::dist {
namespace {

// A tree of values as one tensor of bytes: the number of parts, the size of each, the parts; the first is the tree, the
// others its tensors' buffers.
at::Tensor pack(const Value& tree) {
  const auto encoded = value::encode(tree);
  std::vector<std::int64_t> head{1 + static_cast<std::int64_t>(encoded.buffers.size()),
                                 static_cast<std::int64_t>(encoded.meta.size())};
  for (const auto& buffer : encoded.buffers) head.push_back(buffer.numel());
  std::string bytes(reinterpret_cast<const char*>(head.data()), head.size() * sizeof head[0]);
  bytes += encoded.meta;
  for (const auto& buffer : encoded.buffers) {
    const at::Tensor here = buffer.cpu();
    bytes.append(static_cast<const char*>(here.const_data_ptr()), static_cast<std::size_t>(here.numel()));
  }
  const auto packed = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(packed.mutable_data_ptr(), bytes.data(), bytes.size());
  return packed;
}

Value unpack(const at::Tensor& packed) {
  const auto* at = static_cast<const char*>(packed.const_data_ptr());
  const auto number = [&at] {
    std::int64_t value = 0;
    std::memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
  };
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(number()));
  for (auto& size : sizes) size = number();
  const std::string_view meta(at, static_cast<std::size_t>(sizes[0]));
  at += sizes[0];
  std::vector<at::Tensor> buffers;
  for (std::size_t i = 1; i < sizes.size(); ++i) {
    buffers.push_back(at::empty({sizes[i]}, at::kByte));
    std::memcpy(buffers.back().mutable_data_ptr(), at, static_cast<std::size_t>(sizes[i]));
    at += sizes[i];
  }
  return value::decode(meta, std::move(buffers));
}

}  // namespace

std::vector<Value> all_gather_object(const Value& object) {
  if (group_for("all_gather_object()") == nullptr) return {object};
  const at::Tensor own = pack(object);
  std::vector<std::int64_t> sizes;
  for (const auto& size : all_gather(at::full({1}, own.numel(), at::kLong))) sizes.push_back(size.item<std::int64_t>());
  const at::Tensor padded = at::empty({std::ranges::max(sizes)}, at::kByte);
  padded.narrow(0, 0, own.numel()).copy_(own);
  const auto gathered = all_gather(padded);
  std::vector<Value> objects;
  for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
    objects.push_back(unpack(gathered[rank].narrow(0, 0, sizes[rank])));
  }
  return objects;
}

void broadcast_object_list(std::vector<Value>& objects, int src) {
  const at::Tensor size = at::full({2}, 0, at::kLong);
  const bool speaks = get_global_rank() == src;
  at::Tensor packed;
  if (speaks) {
    packed = pack(value::List{objects});
    size[0] = packed.numel();
    size[1] = static_cast<std::int64_t>(objects.size());
  }
  broadcast(size, src);
  if (!speaks) packed = at::empty({size[0].item<std::int64_t>()}, at::kByte);
  broadcast(packed, src);
  if (speaks) return;
  const auto count = static_cast<std::size_t>(size[1].item<std::int64_t>());
  if (count != objects.size()) {
    throw base::UsageError(base::str("broadcast_object_list(): a list of ", objects.size(), " on rank ",
                                     get_global_rank(), " and of ", count, " on rank ", src, ": give equally many"));
  }
  objects = unpack(packed).as<value::List>().items;
}

}  // namespace lamina::dist
