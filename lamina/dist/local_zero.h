// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>

namespace lamina::dist {

// Collective: each rank brings what went wrong on it, or null; the first that did is thrown on all, as
// value::RemoteFailure on others than its own, which throws it itself.
void share_failures(std::exception_ptr failure);

}  // namespace lamina::dist
