// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

namespace lamina::value {

// Names for what is not the same in all versions of torch that lamina compiles with (docs/decisions/building.md).

// Since 2.13 nodes of autograd's graph count those who hold them themselves, collectives of one tensor have names
// and types of their own, and what keeps memory from being read can be taken back.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
template <class Node>
using NodePtr = std::shared_ptr<Node>;
template <class Node>
using NodeWeakPtr = std::weak_ptr<Node>;

template <class Node, class... Arguments>
NodePtr<Node> make_node(Arguments&&... arguments) {
  return {new Node(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode};
}

inline constexpr auto kReduceScatterCoalesced = c10d::OpType::_REDUCE_SCATTER_BASE;
inline constexpr auto kAllGather = &c10d::ProcessGroup::_allgather_base;
inline constexpr auto kAllGatherAll = &c10d::ProcessGroup::allgather_into_tensor_coalesced;
inline constexpr auto kReduceScatter = &c10d::ProcessGroup::_reduce_scatter_base;
inline constexpr auto kReduceScatterAll = &c10d::ProcessGroup::reduce_scatter_tensor_coalesced;
inline constexpr auto kAllToAll = &c10d::ProcessGroup::alltoall_base;

// Torch cannot take that back there: a kernel that reads memory which is away finds none, and no words.
inline void forbid_reading(c10::StorageImpl&, const std::string&) {}
inline void allow_reading(c10::StorageImpl&) {}
#else
template <class Node>
using NodePtr = c10::intrusive_ptr<Node>;
template <class Node>
using NodeWeakPtr = c10::weak_intrusive_ptr<Node>;

template <class Node, class... Arguments>
NodePtr<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

inline constexpr auto kReduceScatterCoalesced = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
inline constexpr auto kAllGather = &c10d::ProcessGroup::all_gather_single;
inline constexpr auto kAllGatherAll = &c10d::ProcessGroup::all_gather_single_coalesced;
inline constexpr auto kReduceScatter = &c10d::ProcessGroup::reduce_scatter_single;
inline constexpr auto kReduceScatterAll = &c10d::ProcessGroup::reduce_scatter_single_coalesced;
inline constexpr auto kAllToAll = &c10d::ProcessGroup::all_to_all_single;

// Reading this memory is an error that says why.
inline void forbid_reading(c10::StorageImpl& memory, const std::string& why) {
  memory.release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}
inline void allow_reading(c10::StorageImpl& memory) { memory.clear_data_ptr_access_error_msg_(); }
#endif

}  // namespace lamina::value
