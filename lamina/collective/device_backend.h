// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/collective/backend.h"

namespace lamina::collective {

// This member's end of a group for tensors of the rank's device, in a process without Python. It goes over NCCL where
// each member has that library and no two share a device. Else it goes through the host, and the first member says why.
// `on_host` is a backend of the same group that nobody else has. Collective over the group. Throws what make_backend()
// does, and base::UsageError and base::Error with NCCL's words.
c10::intrusive_ptr<c10d::Backend> make_device_backend(const BackendOptions& options,
                                                      c10::intrusive_ptr<c10d::Backend> on_host);

}  // namespace lamina::collective
