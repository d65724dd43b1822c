// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lamina/remote/signature.h"

namespace lamina::remote {

// [Note: prediction] A call like an earlier one returns at once, with references in the place of its outputs. "Like"
// means the same module, modes, training flags and arguments, but for the contents of tensors. What it is taken to
// return is checked by the owner, so a wrong prediction is an error and never a wrong number. A module that looked at
// data while it was watched (data_watch.h), or returned anything but tensors and None, is never predicted.
//
// A prediction was wrong: `what` ("the results of") `module` is not what it was the last time.
[[noreturn]] void throw_unexpected(const std::string& module, const char* what);

// Experience of this rank with calls of one kind. Thread-safe.
class CallProfile {
 public:
  // Describes what such a call returns; nothing while that is not known.
  std::shared_ptr<const OutputSpec> output_spec() const;
  void learn_output_spec(std::optional<OutputSpec> output_spec);  // nothing: this kind is never predicted

  // [Note: routes] Which ranks read which output of the n-th such call of a context: the maker sends it there without
  // being asked.
  using Route = std::multiset<std::pair<std::int64_t, base::Rank>>;  // output, reader: as often as it reads it
  Route route(int ordinal) const;
  void learn_reader(int ordinal, std::int64_t output, base::Rank reader);
  void forget_reader(int ordinal, std::int64_t output, base::Rank reader);

  // For each pattern of gradients of the outputs that exist ('1') or not ('0'), that of the gradients of the arguments.
  std::optional<std::string> gradient_pattern(const std::string& given) const;
  void learn_gradient_pattern(const std::string& given, std::string result);

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const OutputSpec> output_spec_;
  bool predictable_ = true;
  std::map<int, Route> routes_;
  std::map<std::string, std::string> gradient_patterns_;
};

// Everything that this rank learned, by kind of call. Thread-safe.
class CallProfiles {
 public:
  std::shared_ptr<CallProfile> of(const std::string& kind);

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<CallProfile>> profiles_;
};

}  // namespace lamina::remote
