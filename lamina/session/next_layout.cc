// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/next_layout.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/environment/elastic_terms.h"
#include "lamina/messaging/agreement.h"
#include "lamina/session/survivors.h"

namespace lamina::session {
namespace {

// Distances between numbers of parts are ratios: half as many is as far away as twice as many.
double apart(int one, int other) { return std::abs(std::log(static_cast<double>(one) / other)); }

// In how many parts a model is.
struct PartCounts {
  int partitions = 1, slices = 1, shards = 1;

  int count() const { return partitions * slices * shards; }
};

// Parts that a model can have on so many ranks, as keys, the best first. One that is called outside of step
// functions has one partition, and keeps it; so does one whose layers are whole.
std::vector<std::string> nearest(const config::Config& asked, int ranks) {
  const PartCounts before{asked.partitions, asked.tensor_parallel_degree, asked.sharded_data_parallel_degree};
  std::vector<PartCounts> all;
  for (int pp = 1; pp <= (before.partitions == 1 ? 1 : ranks); ++pp) {
    for (int tp = 1; tp <= (before.slices == 1 ? 1 : ranks); ++tp) {
      for (int sdp = 1; sdp <= ranks; ++sdp) {
        if (const PartCounts parts{pp, tp, sdp}; ranks % parts.count() == 0) all.push_back(parts);
      }
    }
  }
  const auto distance = [&](const PartCounts& parts) {
    return std::tuple(apart(parts.count(), before.count()), apart(parts.partitions, before.partitions),
                      apart(parts.slices, before.slices), -parts.count());
  };
  std::ranges::sort(all, {}, distance);
  std::vector<std::string> keys;
  for (const auto& [pp, tp, sdp] : all) {
    keys.push_back(
        nlohmann::json{{"partitions", pp}, {"tensor_parallel_degree", tp}, {"sharded_data_parallel_degree", sdp}}
            .dump());
  }
  return keys;
}

}  // namespace

config::Config next_layout(Session& before, int ranks, const std::vector<std::string>& layouts,
                           const ChangingJob& job) {
  std::string why;
  const auto fitting = [&](const std::string& keys) -> std::optional<config::Config> {
    try {
      require_may_change(before);
      auto config = config_of(before, keys, ranks);
      require_fits(job, config, ranks / (config.partitions * config.tensor_parallel_degree));
      return config;
    } catch (const base::Error& error) {
      if (why.empty()) why = error.what();
      return std::nullopt;
    }
  };
  auto tried = layouts;
  std::ranges::copy(nearest(before.asked(), ranks), std::back_inserter(tried));
  for (const auto& keys : tried) {
    if (auto config = fitting(keys)) return std::move(*config);
  }
  throw base::ConfigError(base::str("the job has no layout for ", ranks, ranks > 1 ? " ranks: " : " rank: ", why),
                          base::Code{"elastic-refused"});
}

void require_layouts(Session& session, const std::vector<std::string>& layouts, bool of_copies) {
  if (environment::is_newcomer()) return;  // it has those of the others, which the door sees to
  const auto world = session.members(topology::Group::kWorld);
  const auto told = messaging::made_by_first(
      session.mailbox(), world, [&] { return value::Value(nlohmann::json(layouts).dump()); }, session.patience());
  const auto require = [&] {
    if (told.as<std::string>() != nlohmann::json(layouts).dump()) {
      throw base::UsageError("lamina.Run: ranks give different `layouts`", base::Code{"elastic-refused"});
    }
    if (!of_copies && !layouts.empty() && why_no_survivors(session).empty()) {
      throw base::UsageError("lamina.Run: copies of a model go on as fewer copies: `layouts` are for ranks with parts",
                             base::Code{"elastic-refused"});
    }
    require_may_change(session);
    for (const auto& keys : layouts) {
      std::exception_ptr wrong;
      bool fits = false;
      for (int ranks = session.world().size; ranks > 0 && !fits; --ranks) {
        try {
          config_of(session, keys, ranks);
          fits = true;
        } catch (const base::Error&) {
          if (!wrong) wrong = std::current_exception();
        }
      }
      if (!fits) std::rethrow_exception(wrong);
    }
  };
  messaging::act_together(session.mailbox(), world, require, session.patience());
}

}  // namespace lamina::session
