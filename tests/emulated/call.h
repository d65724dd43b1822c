// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <vector>

// An operation without a kernel of ours: the CPU's kernel runs in the device's stream.
namespace emulated {

// [Note: boxed calls] The arguments' tensors are exchanged for their twins. The shapes of what comes out are those that
// the meta kernel says; then the call is enqueued, and the host goes on. Without such a kernel, or when a number comes
// out, the stream is drained, and the host runs the CPU's kernel.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, torch::jit::Stack arguments);

  torch::jit::Stack run();

 private:
  // A tensor `out` that a kernel writes may be resized on the way: the kernel gets another, which is copied.
  struct Out {
    std::size_t argument;
    at::Tensor to;
  };

  bool is_out(std::size_t argument) const;
  bool has_empty_out() const;

  void resize_outs(const torch::jit::Stack& outlined);
  torch::jit::Stack twins(std::vector<Out>& outs) const;
  torch::jit::Stack results_for(const torch::jit::Stack& described) const;
  torch::jit::Stack enqueue_results(const torch::jit::Stack& outlined);
  torch::jit::Stack drain();

  c10::OperatorHandle operation_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack arguments_;
  c10::Device device_;
};

}  // namespace emulated
