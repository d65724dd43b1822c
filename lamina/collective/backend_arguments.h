// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "lamina/shared_memory/communicator.h"
#include "lamina/value/torch_version.h"

namespace lamina::collective {

using Tensors = std::vector<at::Tensor>;

// A kind of operation, as torch knows it and as its profiler and our messages name it.
struct CollectiveKind {
  c10d::OpType type;
  const char* name;
};
inline constexpr CollectiveKind kAllReduce{c10d::OpType::ALLREDUCE, "lamina:all_reduce"};
inline constexpr CollectiveKind kAllReduceCoalesced{c10d::OpType::ALLREDUCE_COALESCED, "lamina:all_reduce_coalesced"};
inline constexpr CollectiveKind kReduce{c10d::OpType::REDUCE, "lamina:reduce"};
inline constexpr CollectiveKind kReduceScatter{c10d::OpType::REDUCE_SCATTER, "lamina:reduce_scatter"};
inline constexpr CollectiveKind kReduceScatterTensor{c10d::OpType::_REDUCE_SCATTER_BASE, "lamina:reduce_scatter"};
inline constexpr CollectiveKind kReduceScatterCoalesced{value::kReduceScatterCoalesced,
                                                        "lamina:reduce_scatter_coalesced"};
inline constexpr CollectiveKind kBroadcast{c10d::OpType::BROADCAST, "lamina:broadcast"};
inline constexpr CollectiveKind kAllGather{c10d::OpType::ALLGATHER, "lamina:all_gather"};
inline constexpr CollectiveKind kAllGatherTensor{c10d::OpType::_ALLGATHER_BASE, "lamina:all_gather"};
inline constexpr CollectiveKind kAllGatherCoalesced{c10d::OpType::ALLGATHER_COALESCED, "lamina:all_gather_coalesced"};
inline constexpr CollectiveKind kGather{c10d::OpType::GATHER, "lamina:gather"};
inline constexpr CollectiveKind kScatter{c10d::OpType::SCATTER, "lamina:scatter"};
inline constexpr CollectiveKind kAllToAll{c10d::OpType::ALLTOALL, "lamina:all_to_all"};
inline constexpr CollectiveKind kAllToAllTensor{c10d::OpType::ALLTOALL_BASE, "lamina:all_to_all"};
inline constexpr CollectiveKind kBarrier{c10d::OpType::BARRIER, "lamina:barrier"};
inline constexpr CollectiveKind kSend{c10d::OpType::SEND, "lamina:send"};
inline constexpr CollectiveKind kReceive{c10d::OpType::RECV, "lamina:recv"};

// True where the storage of a dense tensor holds all that its sizes reach: resize_(0) of a storage frees it.
bool has_memory(const at::Tensor& tensor);

// Checks of what callers give to collectives of a group of `size` members. All throw base::UsageError, which names the
// operation.
void require_dense(CollectiveKind kind, const at::Tensor& tensor);
// Checks two tensors that go into one operation.
void require_alike(CollectiveKind kind, const at::Tensor& one, const at::Tensor& other);
void require_as_many(CollectiveKind kind, std::size_t given, std::size_t expected);
// Each of `all` has as many elements as all members' of `mine` together, of one type.
void require_parts(CollectiveKind kind, const Tensors& all, const Tensors& mine, int size);
// One part per member, each as large as `mine` and of its type.
void require_list(CollectiveKind kind, const Tensors& parts, const at::Tensor& mine, int size);
int require_member(CollectiveKind kind, std::int64_t index, int size);  // gives the index

// Checked parts of it: the only tensor of a list, the only list of parts of `mine`.
const at::Tensor& only(CollectiveKind kind, const Tensors& tensors);
Tensors list_of(CollectiveKind kind, const std::vector<Tensors>& lists, const at::Tensor& mine, int size);
// Elements that go to, or come from, each member: so many rows of the tensor, as many for each where `rows` is empty.
std::vector<std::size_t> counts_of(const at::Tensor& tensor, const std::vector<std::int64_t>& rows, int size);
shared_memory::Reduction reduction_of(CollectiveKind kind, const c10d::ReduceOp& operation);
// The type of a tensor's elements.
shared_memory::Reduction reduction_for(CollectiveKind kind, const at::Tensor& tensor, const c10d::ReduceOp& operation);

}  // namespace lamina::collective
