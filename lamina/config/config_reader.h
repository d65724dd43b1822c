// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <utility>

#include "lamina/config/config.h"
#include "lamina/config/config_keys.h"
#include "lamina/config/problems.h"
#include "lamina/config/scalar.h"

namespace lamina::config {

// Understands one written parameter after the other.
class ConfigReader {
 public:
  // `problems` must outlive the reader.
  explicit ConfigReader(Problems& problems) : problems_(problems) {}

  void read(const std::string& name, const Scalar& value);

  // What has been read so far; a key with a problem keeps its default.
  const Config& config() const { return config_; }

  // The tolerated keys among those read, as "fast_mode, static_mode"; often empty.
  const std::string& tolerated() const { return tolerated_; }

 private:
  void accept(const Key& key, const std::string& name, const Scalar& value);

  Problems& problems_;
  Config config_;
  std::map<std::string, std::pair<std::string, Scalar>> given_;  // by canonical name: name and value as first given
  std::string tolerated_;
};

}  // namespace lamina::config
