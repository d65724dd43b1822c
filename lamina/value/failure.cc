// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/failure.h"

#include "lamina/base/str.h"

namespace lamina::value {

Value to_value(const Failure& failure) {
  return Tuple{{failure.type, failure.message, failure.traceback, failure.rank.value, failure.object}};
}

Failure to_failure(const Value& value) {
  const auto& items = value.as<Tuple>().items;
  if (items.size() != 5) throw base::FormatError("a failure without five parts");
  return {items[0].as<std::string>(), items[1].as<std::string>(), items[2].as<std::string>(),
          base::Rank(items[3].as<std::int64_t>()), items[4]};
}

RemoteFailure::RemoteFailure(Failure failure)
    : base::Error(base::str(failure.type, " on rank ", failure.rank, ": ", failure.message,
                            failure.traceback.empty() ? "" : "\n", failure.traceback)),
      failure_(std::move(failure)) {}

}  // namespace lamina::value
