// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/registry.h"

#include "lamina/base/str.h"
#include "lamina/fused/plugin_rule.h"
#include "lamina/fused/rules.h"
#include "lamina/optim/fused_functional.h"

namespace lamina::optim {

Registry::Registry() {
  for (const fused::Rule* rule : fused::rules()) {
    functionals_[rule->declaration.name] = std::make_shared<FusedFunctional>(*rule);
  }
}

void Registry::add(const std::string& name, std::shared_ptr<const Functional> functional) {
  const std::lock_guard guard(mutex_);
  functionals_[name] = std::move(functional);
}

std::string Registry::load(const std::string& path) {
  struct Loaded {
    explicit Loaded(const std::string& path) : plugin(path), functional(plugin.rule()) {}
    fused::PluginRule plugin;
    FusedFunctional functional;
  };
  const auto loaded = std::make_shared<Loaded>(path);
  std::string name = loaded->functional.declaration().name;
  const void* table = loaded->plugin.rule().context;
  const std::lock_guard guard(mutex_);
  if (const auto known = loaded_.find(table); known != loaded_.end()) return known->second;
  if (functionals_.contains(name)) name = base::str(name, " of ", path);
  functionals_[name] = std::shared_ptr<const Functional>(loaded, &loaded->functional);
  loaded_[table] = name;
  return name;
}

std::shared_ptr<const Functional> Registry::find(const std::string& name) const {
  const std::lock_guard guard(mutex_);
  const auto found = functionals_.find(name);
  return found == functionals_.end() ? nullptr : found->second;
}

Registry& shared_registry() {
  static auto& registry = *new Registry();  // threads may look things up until the process ends
  return registry;
}

}  // namespace lamina::optim
