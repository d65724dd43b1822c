// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/elastic_terms.h"

#include <algorithm>

#include "lamina/base/whole_number.h"
#include "lamina/environment/rank_contract.h"

namespace lamina::environment {

std::optional<ElasticTerms> ElasticTerms::read(const Environment& environment) {
  const auto text = environment(kElasticVariable);
  if (!text) return std::nullopt;
  const auto colon = text->find(':');
  ElasticTerms terms;
  terms.least = std::max(1, base::whole_number(text->substr(0, colon)).value_or(1));
  if (colon != std::string::npos) terms.most = base::whole_number(text->substr(colon + 1)).value_or(0);
  return terms;
}

}  // namespace lamina::environment
