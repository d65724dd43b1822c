// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/traffic.h"

#include <algorithm>
#include <set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::plan {

Traffic::Traffic(int items, std::vector<int> visits, std::vector<ReadValue> values)
    : items_(items), visits_(std::move(visits)), values_(std::move(values)) {
  check();
}

Traffic Traffic::of_tree(const Route& route, const Items& items) {
  std::vector<int> visits;
  std::vector<ReadValue> values;  // by maker
  for (const Point& point : route.points) {
    values.push_back({.maker = static_cast<int>(visits.size())});
    visits.push_back(items.of[point.node]);
  }
  visits.push_back(0);
  const auto read = [&](const RouteSource& source, int reader) {
    values[source.point].readers.push_back(reader);
    values[source.point].bytes = std::max(values[source.point].bytes, source.bytes);
  };
  for (int at = 0; at < static_cast<int>(route.points.size()); ++at) {
    for (const RouteSource& source : route.points[at].reads) read(source, at);
  }
  for (const RouteSource& source : route.results) read(source, static_cast<int>(route.points.size()));
  std::erase_if(values, [](const ReadValue& value) { return value.readers.empty(); });
  return {items.size(), std::move(visits), std::move(values)};
}

Traffic Traffic::of_graph(const Route& route, const Items& items) {
  Route inside = route;
  inside.results.clear();  // the root reads them
  Traffic found = of_tree(inside, items);
  for (ReadValue& value : found.values_) {
    const auto outside = [&](int reader) { return found.visits_[reader] == 0; };
    value.everywhere = std::erase_if(value.readers, outside) > 0;
  }
  return found;
}

void Traffic::check() const {
  const auto visits = static_cast<int>(visits_.size());
  const auto is_there = [](int number, int count) { return number >= 0 && number < count; };
  for (int visit = 0; visit < visits; ++visit) {
    if (is_there(visits_[visit], items_)) continue;
    throw base::ConfigError(
        base::str("visit ", visit, " is of item ", visits_[visit], ", which is not there: there are ", items_));
  }
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const auto refuse = [&](const auto&... problem) {
      throw base::ConfigError(base::str("value ", i, " of visit ", values_[i].maker, problem...));
    };
    const auto& [maker, readers, bytes, everywhere] = values_[i];
    if (!is_there(maker, visits)) refuse(", which is not there: there are ", visits);
    if (bytes < 0) refuse(" has ", bytes, " bytes");
    for (const int reader : readers) {
      if (!is_there(reader, visits)) refuse(" is read by visit ", reader, ", which is not there: there are ", visits);
      if (reader <= maker) refuse(" is read by visit ", reader, ", before it is made");
    }
  }
}

std::vector<int> Traffic::users(const ReadValue& value) const {
  std::set<int> users{visits_[value.maker]};
  for (const int reader : value.readers) users.insert(visits_[reader]);
  return {users.begin(), users.end()};
}

std::vector<std::int64_t> Traffic::sent_bytes(const std::vector<int>& owners, int ranks) const {
  std::vector<std::int64_t> sent(ranks);
  for (const ReadValue& value : values_) {
    std::set<int> readers;
    for (const int user : users(value)) readers.insert(owners[user]);
    const auto others = value.everywhere ? ranks - 1 : static_cast<int>(readers.size()) - 1;
    sent[owners[visits_[value.maker]]] += others * value.bytes;
  }
  return sent;
}

}  // namespace lamina::plan
