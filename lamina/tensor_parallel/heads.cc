// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/heads.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/tensor_parallel/slices.h"

namespace lamina::tensor_parallel {
namespace {

constexpr std::string_view kCounts[] = {"num_heads", "num_attention_heads", "n_heads", "n_head"};
constexpr std::string_view kKeyCounts[] = {"num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head"};
constexpr std::string_view kGroups[] = {"num_key_value_groups", "n_rep"};  // heads for each head of keys
constexpr std::string_view kWidths[] = {"head_dim", "head_size", "attention_head_size", "key_value_proj_dim"};
constexpr std::string_view kSizes[] = {"split_size", "all_head_size", "inner_dim"};  // features of all heads

// The first of these attributes that a module has; 0 where it has none.
std::int64_t number(const ParentModule& module, std::span<const std::string_view> names) {
  for (const auto name : names) {
    if (const auto found = module.numbers.find(std::string(name)); found != module.numbers.end()) return found->second;
  }
  return 0;
}

bool divides(std::int64_t count, const std::vector<std::int64_t>& sizes) {
  return std::ranges::all_of(sizes, [&](std::int64_t size) { return size % count == 0; });
}

// True where the script says how many heads the module has.
bool is_said(const std::optional<SaidHeads>& said, const std::vector<std::int64_t>& columns,
             const std::vector<std::int64_t>& rows) {
  if (!said || said->count == 0) return false;
  return !said->name.empty() || (divides(said->count, columns) && divides(said->count, rows));
}

void require_heads(const Heads& heads) {
  if (heads.count % heads.keys != 0) {
    throw base::UsageError(base::str(heads.module.type, " has ", heads.count, " heads, and ", heads.keys,
                                     " of keys, which does not divide that"),
                           base::Code{"tp-layer"});
  }
  require_each(
      base::str(heads.module.type, " has ", heads.count, " heads, in ", heads.units(), " parts that are not torn"),
      shares_of(heads.units(), 1, heads.degree));
}

}  // namespace

layout::Share Heads::own(int member) const {
  return shares_of(count, count / units(), degree).at(static_cast<std::size_t>(member));
}

bool Heads::are_shared_keys(std::int64_t extent) const {
  return keys < std::min<std::int64_t>(degree, count) && extent == keys * width;
}

std::vector<std::int64_t> Heads::own_keys(int member) const {
  const auto share = own(member);
  std::vector<std::int64_t> of_heads, keys_here;
  for (auto head = share.begin; head < share.end; ++head) of_heads.push_back(head / (count / keys));
  std::ranges::unique_copy(of_heads, std::back_inserter(keys_here));
  const auto uses = [&](std::int64_t key) { return std::ranges::count(of_heads, key); };
  const auto is_even = [&](std::int64_t key) { return uses(key) == uses(keys_here.front()); };
  return std::ranges::all_of(keys_here, is_even) ? keys_here : of_heads;
}

std::int64_t Heads::unit_of(const std::string& layer, std::int64_t extent) const {
  const auto unit = extent / units();
  if (extent == 0 || extent % units() != 0 || (width != 0 && unit % width != 0)) {
    throw base::UsageError(
        base::str(layer, " has ", extent, " features, which are no whole number of them for each of ", units(),
                  " heads of ", module.type, ": leave the layer out of the plan"),
        base::Code{"tp-layer"});
  }
  return unit;
}

std::map<std::string, std::int64_t> Heads::numbers(int member) const {
  const auto heads_here = own(member).count();
  const auto keys_here = static_cast<std::int64_t>(own_keys(member).size());
  std::map<std::string, std::int64_t> result;
  const auto set = [&](std::span<const std::string_view> names, std::int64_t here) {
    for (const auto name : names) {
      if (module.numbers.contains(std::string(name))) result[std::string(name)] = here;
    }
  };
  set(kCounts, heads_here);
  set(kKeyCounts, keys_here);
  set(kGroups, heads_here / keys_here);
  for (const auto name : kSizes) {
    const auto size = number(module, {&name, 1});
    if (size != 0 && size % count == 0) result[std::string(name)] = size / count * heads_here;
  }
  if (!said.empty()) result[said] = heads_here;
  return result;
}

std::optional<Heads> heads_of(const ParentModule& module, const std::vector<std::int64_t>& columns,
                              const std::vector<std::int64_t>& rows, int degree, const std::optional<SaidHeads>& said) {
  Heads heads{module, number(module, kCounts), number(module, kKeyCounts), number(module, kWidths), degree, ""};
  if (is_said(said, columns, rows)) {
    heads.count = said->count;
    heads.said = said->name;
    if (heads.width == 0 && !rows.empty() && rows.front() % heads.count == 0) heads.width = rows.front() / heads.count;
  } else if (heads.count == 0 && heads.width != 0) {
    const auto features = rows.empty() ? std::ranges::max(columns) : rows.front();
    heads.count = std::max<std::int64_t>(1, features / heads.width);
  }
  if (heads.count == 0) return {};
  if (heads.keys == 0) {
    const auto given = heads.width == 0 ? heads.count : std::ranges::min(columns) / heads.width;
    heads.keys = std::clamp<std::int64_t>(given, 1, heads.count);
  }
  require_heads(heads);
  return heads;
}

}  // namespace lamina::tensor_parallel
