// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "lamina/archive/budget.h"
#include "lamina/foreign/pickle.h"

namespace lamina::foreign {

// Values of a pickle as a manifest has them: None, numbers, texts, lists, tuples, sizes and dicts of these.
class PlainValues {
 public:
  // `bytes`: of the pickle. A pickle may name one value many times, so that what is written out is bounded by its size.
  explicit PlainValues(std::uint64_t bytes) : budget_(bytes, std::uint64_t{64} << 20) {}

  // None where it holds something else, or would take too much memory.
  std::optional<nlohmann::json> of(const PickleValue& value);

 private:
  nlohmann::json write(const PickleValue& value, int depth);

  archive::Budget budget_;
};

}  // namespace lamina::foreign
