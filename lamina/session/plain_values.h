// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lamina/layout/parameter_layout.h"
#include "lamina/model/values.h"
#include "lamina/session/session.h"
#include "lamina/sharding/sharding.h"

// Values of a model that is cut, or is to be, brought to the ranks that call it plainly.
namespace lamina::session {

// A parameter or buffer of a model, whole or a slice.
struct CheckedTensor {
  std::string name;
  at::Tensor tensor;
  std::optional<layout::Slicing> slicing = {};
};

struct PlainValues {
  std::map<std::string, at::Tensor> tensors;  // parameters and buffers, whole, by name
  std::set<std::string> hooked;               // names of parameters that have hooks where they live
  std::vector<model::NamedValue> attributes;  // of modules that live elsewhere, as the face names them
};

// Values of world rank 0, before the model is cut over partitions; collective over the world. Nothing where nobody
// lacks them.
std::optional<PlainValues> values_of_first(Session& session, std::span<const CheckedTensor> tensors);

// The part of a model that is cut which one rank has.
struct OwnValues {
  std::vector<CheckedTensor> tensors;
  sharding::Sharding* sharding = nullptr;  // of them; nullptr where nothing is sharded
  std::set<std::string> hooked;
  std::vector<model::NamedValue> attributes;
};

// Values of all owners, on the first rank of the pipeline; collective over the copy of the model and its sharding
// group. `wanted`: whether this rank's pipeline is to have them, or is just asked for its slices; nothing then.
std::optional<PlainValues> values_of_owners(Session& session, OwnValues own, bool wanted);

}  // namespace lamina::session
