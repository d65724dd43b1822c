// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/options.h"

#include <algorithm>
#include <ranges>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"

namespace lamina::distributed_optimizer {
namespace {

using Option = std::pair<std::string, std::string>;  // what it is, and its value

std::vector<Option> options_in(const std::string& text) {
  constexpr std::string_view kIs = " = ";
  std::vector<Option> all;
  for (const auto each : std::views::split(text, '\n')) {
    const std::string line(each.begin(), each.end());
    const auto at = line.find(kIs);
    if (at != std::string::npos) all.emplace_back(line.substr(0, at), line.substr(at + kIs.size()));
  }
  return all;
}

std::string value_in(const std::vector<Option>& options, const std::string& what) {
  const auto found = std::ranges::find(options, what, &Option::first);
  return found == options.end() ? "not there" : found->second;
}

}  // namespace

std::int64_t hash_of_options(const std::string& options) {
  return static_cast<std::int64_t>(base::hash64(std::string_view(options)));
}

std::vector<base::Rank> trained_with(const collective::Ranks& ranks, const config::Config& config, bool with_copies) {
  return with_copies && config.ddp ? ranks.everyone() : ranks.one_copy();
}

void require_alike(const std::string& options, std::span<const base::Rank> trained, const collective::Ranks& ranks) {
  if (messaging::are_alike(ranks.mailbox, trained, hash_of_options(options), ranks.patience())) return;
  tell_difference(options, trained, ranks);
}

void tell_difference(const std::string& options, std::span<const base::Rank> trained, const collective::Ranks& ranks) {
  const auto told = ranks.mailbox.all_gather(trained, options, ranks.patience());
  const auto first = options_in(told.front().as<std::string>());
  for (std::size_t i = 1; i < told.size(); ++i) {
    if (told[i].as<std::string>() == told.front().as<std::string>()) continue;
    const auto others = options_in(told[i].as<std::string>());
    auto all = first;
    all.insert(all.end(), others.begin(), others.end());
    const auto differs = [&](const Option& option) {
      return value_in(first, option.first) != value_in(others, option.first);
    };
    const auto found = std::ranges::find_if(all, differs);
    base::internal_check(found != all.end(), "texts of options that differ have a line that does");
    throw base::UsageError(
        base::str("optimizer.step(): ", found->first, " is ", value_in(first, found->first), " on rank ",
                  trained.front(), " and ", value_in(others, found->first), " on rank ", trained[i],
                  "; nothing was updated. Ranks that train one model step alike: give optimizers the same options on "
                  "all of them, and schedulers the same numbers (a value that a step body computes, or one of this "
                  "rank's data, goes to all by lamina.broadcast or lamina.allgather). Where one has caught an error "
                  "of an update, or has alone loaded a state, load one on all"),
        base::Code{"optimizer-differs"});
  }
  throw base::InternalError("texts of options are alike, whose hashes are not");
}

}  // namespace lamina::distributed_optimizer
