// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace lamina::frontend {

using PartitionCallback = std::function<void()>;

// Refuses in the body of a step what every rank of a pipeline is to do; throws base::UsageError.
void everywhere(const std::string& what);

// Has `callback` called when the job's model is cut, as long as it is kept; at once where it is cut already.
void on_partition(const std::shared_ptr<PartitionCallback>& callback);

}  // namespace lamina::frontend
