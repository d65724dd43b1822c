// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/elastic_terms.h"

#include <algorithm>

#include "lamina/base/whole_number.h"
#include "lamina/environment/rank_contract.h"

namespace lamina::environment {
namespace {

std::optional<std::chrono::seconds> seconds_of(const Environment& environment, const char* name) {
  const auto number = base::whole_number(environment(name).value_or(""));
  return number ? std::optional(std::chrono::seconds(std::max(0, *number))) : std::nullopt;
}

}  // namespace

std::optional<ElasticTerms> ElasticTerms::read(const Environment& environment) {
  const auto text = environment(kElasticVariable);
  if (!text) return std::nullopt;
  const auto colon = text->find(':');
  ElasticTerms terms;
  terms.least = std::max(1, base::whole_number(text->substr(0, colon)).value_or(1));
  if (colon != std::string::npos) terms.most = base::whole_number(text->substr(colon + 1)).value_or(0);
  if (const auto every = seconds_of(environment, kJoinEveryVariable)) terms.join_every = *every;
  return terms;
}

bool is_newcomer() { return process_environment()(kNewcomerVariable).has_value(); }

NewcomerTerms NewcomerTerms::read(const Environment& environment) {
  NewcomerTerms terms;
  terms.together = std::max(0, base::whole_number(environment(kNewcomerVariable).value_or("")).value_or(0));
  if (const auto wait = seconds_of(environment, kSpareWaitVariable)) terms.spare_wait = *wait;
  return terms;
}

}  // namespace lamina::environment
