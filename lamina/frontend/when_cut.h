// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace lamina::frontend {

using Owns = std::function<bool(const at::Tensor& parameter)>;  // whether this rank does
using Trim = std::function<void(const Owns& owns)>;

// Refuses in the body of a step what every rank of a pipeline is to do; throws base::UsageError.
void everywhere(const std::string& what);

// Has `trim` called when the job's model is cut, as long as it is kept; at once where it is cut already.
void when_cut(const std::shared_ptr<Trim>& trim);

}  // namespace lamina::frontend
