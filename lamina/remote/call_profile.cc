// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/call_profile.h"

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

std::shared_ptr<const OutputSpec> CallProfile::output_spec() const {
  std::lock_guard guard(mutex_);
  return output_spec_;
}

void CallProfile::learn_output_spec(std::optional<OutputSpec> output_spec) {
  std::lock_guard guard(mutex_);
  predictable_ = predictable_ && output_spec.has_value() &&
                 (!output_spec_ || output_spec_->fingerprint == output_spec->fingerprint);
  if (output_spec && output_spec_)
    output_spec->fetches_views = output_spec->fetches_views || output_spec_->fetches_views;
  output_spec_ = predictable_ ? std::make_shared<const OutputSpec>(std::move(*output_spec)) : nullptr;
}

CallProfile::Route CallProfile::route(int ordinal) const {
  std::lock_guard guard(mutex_);
  const auto found = routes_.find(ordinal);
  return found == routes_.end() ? Route() : found->second;
}

void CallProfile::learn_reader(int ordinal, std::int64_t output, base::Rank reader) {
  std::lock_guard guard(mutex_);
  routes_[ordinal].emplace(output, reader);
}

void CallProfile::forget_reader(int ordinal, std::int64_t output, base::Rank reader) {
  std::lock_guard guard(mutex_);
  auto& route = routes_[ordinal];
  if (const auto found = route.find({output, reader}); found != route.end()) route.erase(found);
}

std::optional<std::string> CallProfile::gradient_pattern(const std::string& given) const {
  std::lock_guard guard(mutex_);
  const auto found = gradient_patterns_.find(given);
  return found == gradient_patterns_.end() ? std::nullopt : std::optional(found->second);
}

void CallProfile::learn_gradient_pattern(const std::string& given, std::string result) {
  std::lock_guard guard(mutex_);
  gradient_patterns_[given] = std::move(result);
}

std::shared_ptr<CallProfile> CallProfiles::of(const std::string& kind) {
  std::lock_guard guard(mutex_);
  if (profiles_.size() >= kMaxKinds && !profiles_.contains(kind)) profiles_.clear();
  auto& profile = profiles_[kind];
  if (!profile) profile = std::make_shared<CallProfile>();
  return profile;
}

}  // namespace lamina::remote
