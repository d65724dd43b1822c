// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/file_stretches.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"

namespace lamina::plan {
namespace {

using base::Json;

constexpr const char* kForm =
    " is not [at, forward_us, backward_us, value_bytes, works], with or without weights_us, from 0 to backward_us or "
    "null, and [[at, bytes], ...] of what it reads";

bool is_time(const Json& part) { return part.is_number() && part >= 0 && part <= kMostTime; }
bool is_count(const Json& part) { return part.is_number_integer() && part >= 0 && part <= kMostBytes; }
bool is_place(const Json& part) { return is_count(part) && part <= std::numeric_limits<int>::max(); }
bool is_read(const Json& part) { return part.is_array() && part.size() == 2 && is_place(part[0]) && is_count(part[1]); }

bool has_form(const Json& json) {
  if (!json.is_array() || (json.size() != 5 && json.size() != 7)) return false;
  if (!is_place(json[0]) || !is_time(json[1]) || !is_time(json[2]) || !is_count(json[3]) || !json[4].is_boolean())
    return false;
  if (json.size() == 5) return true;
  if (!json[5].is_null() && (!is_time(json[5]) || json[5] > json[2])) return false;
  return json[6].is_array() && std::ranges::all_of(json[6], is_read);
}

}  // namespace

std::vector<Stretch> read_stretches(config::JsonReader& node) {
  std::vector<Stretch> stretches;
  for (const Json& json : node.list("stretches")) {
    if (!has_form(json)) node.refuse("stretches", json.dump() + kForm);
    Stretch& stretch = stretches.emplace_back();
    stretch.at = json[0].get<int>();
    stretch.forward_us = json[1].get<double>();
    stretch.backward_us = json[2].get<double>();
    stretch.value_bytes = json[3].get<std::int64_t>();
    stretch.works = json[4].get<bool>();
    if (json.size() == 5) continue;
    if (!json[5].is_null()) stretch.weights_us = json[5].get<double>();
    auto& reads = stretch.reads.emplace();
    for (const Json& read : json[6]) reads.push_back({read[0].get<int>(), read[1].get<std::int64_t>()});
  }
  return stretches;
}

void StretchReads::add(const std::vector<Stretch>& stretches) {
  for (const Stretch& stretch : stretches) places_.insert(stretch.at);
}

void StretchReads::check(const std::vector<Stretch>& stretches, const std::string& where) const {
  for (const Stretch& stretch : stretches) {
    if (!stretch.reads) continue;
    for (const Read& read : *stretch.reads) {
      const char* problem = nullptr;
      if (read.at >= stretch.at) problem = ", which does not come before it";
      if (!places_.contains(read.at)) problem = ", which is not there";
      if (problem == nullptr) continue;
      throw base::ConfigError(
          base::str(where, ": stretches: stretch ", stretch.at, " reads stretch ", read.at, problem));
    }
  }
}

}  // namespace lamina::plan
