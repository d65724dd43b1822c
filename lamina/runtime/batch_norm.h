// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

namespace lamina::runtime {

// From now on calls of BatchNorms in inference mode are noted on devices of that type, too: see [Note: running
// statistics]. Calls for which gradients may be wanted are noted anywhere.
void note_inferences(at::Device device);

}  // namespace lamina::runtime
