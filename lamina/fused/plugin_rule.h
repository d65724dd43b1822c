// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lamina/fused/rule.h"

namespace lamina::fused {

// A rule from a shared library (plugin.h), which stays loaded as long as this lives.
class PluginRule {
 public:
  // Throws UsageError, which names the file, for one that is not there, exports no optimizer, or one of another
  // version.
  explicit PluginRule(const std::string& path);
  PluginRule(const PluginRule&) = delete;
  PluginRule& operator=(const PluginRule&) = delete;

  const Rule& rule() const { return rule_; }

 private:
  std::unique_ptr<void, int (*)(void*)> library_;
  std::vector<HyperField> hyper_;
  std::vector<StateField> states_;
  Rule rule_;
};

}  // namespace lamina::fused
