// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/config_reader.h"

#include "lamina/base/str.h"

namespace lamina::config {

void ConfigReader::read(const std::string& name, const Scalar& value) {
  const Key* key = find_key(canonical_name(name));
  Config trial;
  if (is_tolerated(name)) {
    tolerated_ += base::str(tolerated_.empty() ? "" : ", ", name);
  } else if (!key) {
    problems_.add(name, base::str(name, ": ", show(value), " is not allowed, there is no such key; the nearest is ",
                                  nearest_name(name)));
  } else if (!key->read(trial, value)) {
    problems_.add(key->name, not_allowed(name, show(value), key->allowed));
  } else {
    accept(*key, name, value);
  }
}

void ConfigReader::accept(const Key& key, const std::string& name, const Scalar& value) {
  const auto [first, fresh] = given_.emplace(key.name, std::pair(name, value));
  const auto& [first_name, first_value] = first->second;
  if (fresh) {
    key.read(config_, value);
  } else if (first_value != value) {
    problems_.add(key.name, base::str(name, ": ", show(value), " is not allowed with ", first_name, ": ",
                                      show(first_value), "; they are two names of one key, expected the same value"));
  }
}

}  // namespace lamina::config
