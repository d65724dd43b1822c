// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "lamina/base/error.h"
#include "lamina/base/ids.h"

namespace lamina::tensor_parallel {

// Parts of a call of the model that members of a team are to have alike: see [Note: given alike].
enum class CallTrait { kValues, kTraining, kTrained, kGradients, kCount };

// A hash of each of them.
using CallHashes = std::array<std::int64_t, static_cast<std::size_t>(CallTrait::kCount)>;

// A call of the model by a rank.
struct ModelCall {
  std::span<const at::Tensor> tensors;
  std::string_view training = {};  // whether each module trains
  std::string_view trained = {};   // whether each parameter has a gradient
  bool on_devices = false;         // values there count, which takes a wait for the device
};

// Hashes of these, and of modes of this thread.
CallHashes hashes_of(const ModelCall& call);

base::DesyncError given_apart(CallTrait what, base::Rank one, base::Rank other);

}  // namespace lamina::tensor_parallel
