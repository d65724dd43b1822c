// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/learned.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::remote {
namespace {

// A script whose calls are never alike (a counter among the arguments) learns nothing and must not pile it up.
constexpr std::size_t kMaxKinds = 4096;

}  // namespace

void throw_unexpected(const std::string& module, const char* what) {
  throw base::UsageError(base::str(what, " ", module.empty() ? "the model" : module,
                                   " are not like those of an earlier call with arguments of the same kind; tell that "
                                   "they vary: set_dynamic(module) before the first step"),
                         base::Code{"step-unlike-before"});
}

std::shared_ptr<const Outline> Learned::outline() const {
  std::lock_guard guard(mutex_);
  return outline_;
}

void Learned::learn_outline(std::optional<Outline> outline) {
  std::lock_guard guard(mutex_);
  predictable_ = predictable_ && outline.has_value() && (!outline_ || outline_->fingerprint == outline->fingerprint);
  if (outline && outline_) outline->fetches_views = outline->fetches_views || outline_->fetches_views;
  outline_ = predictable_ ? std::make_shared<const Outline>(std::move(*outline)) : nullptr;
}

Learned::Route Learned::route(int ordinal) const {
  std::lock_guard guard(mutex_);
  const auto found = routes_.find(ordinal);
  return found == routes_.end() ? Route() : found->second;
}

void Learned::learn_reader(int ordinal, std::int64_t output, base::Rank reader) {
  std::lock_guard guard(mutex_);
  routes_[ordinal].emplace(output, reader);
}

void Learned::forget_reader(int ordinal, std::int64_t output, base::Rank reader) {
  std::lock_guard guard(mutex_);
  auto& route = routes_[ordinal];
  if (const auto found = route.find({output, reader}); found != route.end()) route.erase(found);
}

std::optional<std::string> Learned::gradient_pattern(const std::string& given) const {
  std::lock_guard guard(mutex_);
  const auto found = gradient_patterns_.find(given);
  return found == gradient_patterns_.end() ? std::nullopt : std::optional(found->second);
}

void Learned::learn_gradient_pattern(const std::string& given, std::string result) {
  std::lock_guard guard(mutex_);
  gradient_patterns_[given] = std::move(result);
}

std::shared_ptr<Learned> Experience::of(const std::string& kind) {
  std::lock_guard guard(mutex_);
  if (learned_.size() >= kMaxKinds && !learned_.contains(kind)) learned_.clear();
  auto& learned = learned_[kind];
  if (!learned) learned = std::make_shared<Learned>();
  return learned;
}

}  // namespace lamina::remote
