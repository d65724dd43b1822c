// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/str.h"
#include "lamina/dist/current.h"
#include "lamina/dist/dist.h"
#include "lamina/dist/errors.h"

namespace lamina::dist {
namespace {

using c10d::ReduceOp;

ReduceOp::RedOpType operation(std::string name) {
  static const std::map<std::string, ReduceOp::RedOpType> known = {
      {"SUM", ReduceOp::SUM},   {"PRODUCT", ReduceOp::PRODUCT}, {"MIN", ReduceOp::MIN},  {"MAX", ReduceOp::MAX},
      {"BAND", ReduceOp::BAND}, {"BOR", ReduceOp::BOR},         {"BXOR", ReduceOp::BXOR}};
  const std::string given = name;
  std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::toupper(letter); });
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  throw base::UsageError(
      base::str("all_reduce: '", given, "' is not allowed; expected one of SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR"));
}

// Runs what `start` begins on the group, or nothing where this rank is alone.
template <class Start>
void run(const std::string& what, const at::Tensor& tensor, const Start& start) {
  if (!tensor.device().is_cpu()) {
    throw base::UsageError(base::str(what, ": a tensor on ", tensor.device().str(), ": Gloo takes those of the CPU"));
  }
  auto* group = group_for(what);
  if (group == nullptr) return;
  typed(what, [&] { start(*group)->wait(); });
}

// Gloo's tensors are dense; what is not is copied there and back.
template <class Start>
void run_in_place(const std::string& what, const at::Tensor& tensor, const Start& start) {
  std::vector<at::Tensor> dense{tensor.contiguous()};
  run(what, tensor, [&](auto& group) { return start(group, dense); });
  if (!dense[0].is_same(tensor)) tensor.copy_(dense[0]);
}

}  // namespace

void barrier() {
  auto* group = group_for("barrier()");
  if (group == nullptr) return;
  typed("barrier()", [&] { group->barrier()->wait(); });
}

void all_reduce(const at::Tensor& tensor, const std::string& reduce_operation) {
  c10d::AllreduceOptions options;
  options.reduceOp = operation(reduce_operation);
  run_in_place("all_reduce()", tensor, [&](auto& group, auto& dense) { return group.allreduce(dense, options); });
}

void broadcast(const at::Tensor& tensor, int src) {
  if (src < 0 || src >= get_world_size()) {
    throw base::UsageError(
        base::str("broadcast(): rank ", src, " is none of the ", get_world_size(), " of this world"));
  }
  c10d::BroadcastOptions options;
  options.rootRank = src;
  run_in_place("broadcast()", tensor, [&](auto& group, auto& dense) { return group.broadcast(dense, options); });
}

std::vector<at::Tensor> all_gather(const at::Tensor& tensor) {
  if (group_for("all_gather()") == nullptr) return {tensor};
  std::vector<std::vector<at::Tensor>> gathered(1);
  for (int rank = 0; rank < get_world_size(); ++rank) {
    gathered[0].push_back(at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous));
  }
  std::vector<at::Tensor> own{tensor.contiguous()};
  run("all_gather()", tensor, [&](auto& group) { return group.allgather(gathered, own); });
  return gathered[0];
}

}  // namespace lamina::dist
