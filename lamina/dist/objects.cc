// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>

#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/dist/current.h"
#include "lamina/dist/dist.h"
#include "lamina/value/bytes.h"
#include "lamina/value/encoding.h"

namespace lamina::dist {
namespace {

at::Tensor tensor_of(std::string_view bytes) {
  const auto tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

// A tree of values as one tensor of bytes.
at::Tensor pack(const Value& tree) {
  const auto encoded = value::encode(tree);
  value::Writer out;
  out.put_block(encoded.meta);
  out.put<std::uint64_t>(encoded.buffers.size());
  for (const auto& buffer : encoded.buffers) {
    const at::Tensor here = devices::on_host(buffer);
    out.put_block({static_cast<const char*>(here.const_data_ptr()), static_cast<std::size_t>(here.numel())});
  }
  return tensor_of(out.take());
}

Value unpack(const at::Tensor& packed) {
  value::Reader in({static_cast<const char*>(packed.const_data_ptr()), static_cast<std::size_t>(packed.numel())});
  const auto meta = in.get_block();
  std::vector<at::Tensor> buffers;
  for (auto left = in.get_count(); left > 0; --left) buffers.push_back(tensor_of(in.get_block()));
  in.expect_end();
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
