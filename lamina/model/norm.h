// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "lamina/messaging/mailbox.h"
#include "lamina/model/parameter_table.h"

namespace lamina::model {

// A parameter or its gradient, which says where it belongs, and what is measured of it here, undefined where there is
// nothing: a parameter and its gradient, say.
using Measured = std::pair<at::Tensor, at::Tensor>;

// The norm of one tensor, of zero dimensions, in its own precision, at least float32: a loss scale may make it larger
// than half precision goes.
at::Tensor norm_of(const at::Tensor& tensor, double norm_type);

// Collective over `one_copy`, the ranks that have the model together: the norms, of zero dimensions, of all values that
// they have measured of its parameters, slices put together. Each value counts once, by a rank that holds it, as often
// as it is given there. They come in the table's order, so all ranks get the same bits. Values of tensors beside the
// model, which are the first rank's, come last. Empty where nobody has anything.
std::vector<at::Tensor> norms(const ParameterTable& table, std::span<const Measured> given, double norm_type,
                              std::span<const base::Rank> one_copy, messaging::Mailbox& mailbox,
                              const base::Patience& patience);

}  // namespace lamina::model
