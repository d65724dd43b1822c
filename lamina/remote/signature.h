// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/value/reference_tensor.h"
#include "lamina/value/value.h"

// Descriptions of trees, apart from the contents of their tensors. Nothing here waits for a reference.
namespace lamina::remote {

// The tensors of a tree, each tensor object once, in the order of for_each_tensor.
std::vector<at::Tensor> distinct_tensors(const value::Value& tree);

// Bytes that are equal for two trees when they differ in the contents of their tensors alone: structure, other values,
// and shape, strides, dtype, device, requires_grad and identity of the tensors.
std::string signature(const value::Value& tree);

// A tree that can be made before its tensors are known: containers, None and tensors alone.
struct OutputSpec {
  struct Output {
    value::TensorSpec spec;
    bool requires_grad = false;
  };
  // In the place of each tensor its number in `outputs`, as an int; arguments that are handed back are references.
  value::Value tree;
  std::vector<Output> outputs;
  std::uint64_t fingerprint = 0;  // never 0; equal for equal ones
  std::string reached;            // CalleeGraph::reached(): not in the fingerprint
  std::string views;              // views.h
  bool fetches_views = false;     // somebody writes to them, or to their arguments; not in the fingerprint
};

// The signature of a call's outputs, where references stand for arguments; nothing for any other kind of tree.
std::optional<OutputSpec> output_spec(const value::Value& outputs, std::string views = {});

// The tree with `tensors` for its outputs.
value::Value filled(const OutputSpec& output_spec, const std::vector<at::Tensor>& tensors);

}  // namespace lamina::remote
