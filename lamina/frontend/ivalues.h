// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <string>

#include "lamina/value/value.h"

namespace lamina::frontend {

// torch's values as trees: tensors, numbers, flags, texts, None, and lists, tuples and dictionaries of these. Throws
// base::UsageError, which begins with `what` it is, for any other.
value::Value value_of(const c10::IValue& value, const std::string& what);
// The way back: a list of numbers is torch's list of them. Throws base::UsageError for what torch has no value of.
c10::IValue to_ivalue(const value::Value& value);

// Values with names.
using Fields = std::map<std::string, c10::IValue>;
value::Value value_of(const Fields& fields, const std::string& what);
Fields to_fields(const value::Value& value);

}  // namespace lamina::frontend
