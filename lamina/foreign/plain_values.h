// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

// Entries of a dict that was written out, in its order, and as an object. Throws base::FormatError where a key is no
// text.
std::vector<std::pair<std::string, nlohmann::json>> pairs_of(const nlohmann::json& dict);
nlohmann::json as_object(const nlohmann::json& dict);

}  // namespace lamina::foreign
