// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/numbers.h"

namespace lamina::value {

Value to_list(const std::vector<std::int64_t>& numbers) { return List{{numbers.begin(), numbers.end()}}; }

std::vector<std::int64_t> to_numbers(const Value& list) {
  std::vector<std::int64_t> numbers;
  for (const auto& number : list.as<List>().items) numbers.push_back(number.as<std::int64_t>());
  return numbers;
}

}  // namespace lamina::value
