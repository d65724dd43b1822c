// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/base/ids.h"

namespace lamina::remote {

// [Note: anywhere] A module without parameters, buffers and a state of its own that is called from several places, such
// as one activation for all layers, is owned by nobody. Wherever it lived, it would draw the values of all its callers
// to one rank. A call of it runs where its argument lies. In the place of its owner the model has this.
inline constexpr base::Rank kAnywhere{-1};

}  // namespace lamina::remote
