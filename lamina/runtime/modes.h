// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace lamina::runtime {

// Torch's modes that go with a call to another rank: grad mode, inference mode, default dtype and autocast of this
// thread as bytes, and back for as long as `work` runs.
std::string capture_modes();
void run_with_modes(std::string_view modes, const std::function<void()>& work);  // throws base::FormatError

}  // namespace lamina::runtime
