// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

namespace lamina::value {

// Names for what is not the same in all versions of torch that lamina compiles with (docs/decisions/building.md).

// Since 2.13 nodes of autograd's graph count those who hold them themselves, and the coalesced collective has a type.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
template <class Node>
using NodePtr = std::shared_ptr<Node>;

template <class Node, class... Arguments>
NodePtr<Node> make_node(Arguments&&... arguments) {
  return {new Node(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode};
}

inline constexpr auto kReduceScatterCoalesced = c10d::OpType::_REDUCE_SCATTER_BASE;
#else
template <class Node>
using NodePtr = c10::intrusive_ptr<Node>;

template <class Node, class... Arguments>
NodePtr<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

inline constexpr auto kReduceScatterCoalesced = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#endif

}  // namespace lamina::value
