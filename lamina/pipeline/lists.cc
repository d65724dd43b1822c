// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/lists.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

namespace lamina::pipeline {
namespace {

using Known = BatchPart::Known;
using RowCounts = std::set<std::int64_t>;
using Places = std::vector<std::size_t>;

class Decision {
 public:
  explicit Decision(std::span<const BatchPart> parts) : parts_(parts) { found_.by_elements.resize(parts.size()); }

  Lists run() && {
    decide(inside(0, parts_.size()));
    return std::move(found_);
  }

 private:
  bool is_list(std::size_t place) const { return parts_[place].kind == BatchPart::Kind::kList; }
  bool is_tensor(std::size_t place) const { return parts_[place].kind == BatchPart::Kind::kTensor; }

  // The parts of [begin, end) that are in no other one, and in the place of containers what these hold.
  Places inside(std::size_t begin, std::size_t end) const {
    Places found;
    for (auto place = begin; place < end; place = parts_[place].end) {
      if (parts_[place].kind != BatchPart::Kind::kContainer) {
        found.push_back(place);
        continue;
      }
      const auto held = inside(place + 1, parts_[place].end);
      found.insert(found.end(), held.begin(), held.end());
    }
    return found;
  }
  Places elements(std::size_t list) const { return inside(list + 1, parts_[list].end); }

  RowCounts rows(std::size_t list) const {
    RowCounts found;
    for (auto place = list + 1; place < parts_[list].end; ++place) {
      if (is_tensor(place)) found.insert(parts_[place].size);
    }
    return found;
  }

  void cut(std::size_t list) { found_.by_elements[list] = true; }
  void doubt(std::size_t list) {
    if (!found_.not_clear) found_.not_clear = list;
  }

  // Decides of the lists among parts that stand side by side.
  void decide(const Places& beside) {
    std::optional<std::int64_t> samples;  // rows of the first tensor, as everywhere
    Places lists;
    for (const auto place : beside) {
      if (is_tensor(place) && !samples) samples = parts_[place].size;
      if (!is_list(place)) continue;
      if (parts_[place].known == Known::kElements) cut(place);
      if (parts_[place].known == Known::kRows) decide(elements(place));
      if (parts_[place].known == Known::kNot) lists.push_back(place);
    }
    if (samples) {
      for (const auto list : lists) beside_samples(list, *samples);
    } else if (lists.size() == 1) {
      alone(lists.front());
    } else if (!lists.empty()) {
      together(lists);
    }
  }

  void beside_samples(std::size_t list, std::int64_t samples) {
    const auto found = rows(list);
    if (parts_[list].size == samples) {
      const bool is_cut = std::ranges::any_of(found, [&](auto each) { return samples == 0 || each % samples != 0; });
      const bool holds = holds_dictionaries(list);
      if (is_cut || !found.contains(samples) || (holds && samples == 1)) return cut(list);
      if (found.size() > 1 || holds) return doubt(list);
    }
    for (const auto place : elements(list)) {
      if (is_list(place)) beside_samples(place, samples);
    }
  }

  // A list without anything beside it.
  void alone(std::size_t list) {
    if (is_table(list)) return table(list);
    const auto held = elements(list);
    const auto tensors = std::ranges::count_if(held, [&](std::size_t place) { return is_tensor(place); });
    const auto lines = held_by(list);
    if (std::ranges::all_of(lines, [&](auto each) { return parts_[each].kind == BatchPart::Kind::kContainer; })) {
      if (have_different_rows(list, 2)) return cut(list);
      const bool has_others = std::cmp_not_equal(tensors, held.size()) && lines.size() > 1;
      if (tensors > 0 && (lines.size() > 2 || has_others || hold_channels(held))) doubt(list);
    } else if (!std::ranges::all_of(lines, [&](auto each) { return is_tensor(each); })) {
      decide(held);  // a batch of several parts
    } else if (have_different_rows(list, 3) || looks_like_pictures(list)) {
      doubt(list);
    }
  }

  bool holds_dictionaries(std::size_t list) const {
    for (auto place = list + 1; place < parts_[list].end; place = parts_[place].end) {
      if (parts_[place].kind == BatchPart::Kind::kContainer) return true;
    }
    return false;
  }

  Places held_by(std::size_t list) const {
    Places found;
    for (auto place = list + 1; place < parts_[list].end; place = parts_[place].end) found.push_back(place);
    return found;
  }
  bool are_of_one_sort(std::size_t one, std::size_t other) const {
    const auto &a = parts_[one], &b = parts_[other];
    return a.kind == b.kind && a.dtype == b.dtype && a.dims == b.dims;
  }

  // True for several lists of one form: pairs of a picture and its class, or two parts of a batch.
  bool is_table(std::size_t list) const {
    const auto lines = held_by(list);
    if (lines.size() < 2 || !std::ranges::all_of(lines, [&](std::size_t line) { return is_list(line); })) return false;
    const auto first = held_by(lines.front());
    return !first.empty() && !rows(list).empty() && std::ranges::all_of(lines, [&](std::size_t line) {
      return std::ranges::equal(held_by(line), first, [&](auto a, auto b) { return are_of_one_sort(a, b); });
    });
  }

  void table(std::size_t list) {
    const auto lines = held_by(list);
    const auto first = held_by(lines.front());
    const bool are_alike = std::ranges::all_of(lines, [&](std::size_t line) {
      return std::ranges::equal(
          held_by(line), first, {}, [&](auto a) { return parts_[a].size; }, [&](auto a) { return parts_[a].size; });
    });
    const bool has_others = !std::ranges::all_of(first, [&](std::size_t place) { return is_tensor(place); });
    const bool is_mixed =
        has_others || !std::ranges::all_of(first, [&](auto each) { return are_of_one_sort(each, first.front()); });
    const bool differ = rows(list).size() > 1;
    if (is_mixed && differ && (lines.size() > 2 || !are_alike)) return cut(list);
    if (lines.size() > 2 || has_others || (differ && (are_alike || is_mixed))) return doubt(list);
    decide(elements(list));  // two parts of a batch
  }

  // True where one of these tensors looks like a picture.
  bool hold_channels(const Places& held) const {
    return std::ranges::any_of(held, [&](std::size_t place) {
      const auto& part = parts_[place];
      return is_tensor(place) && part.dims >= 3 && (part.size == 1 || part.size == 3 || part.size == 4);
    });
  }

  // Lists without any tensor beside them.
  void together(const Places& lists) {
    const auto size = parts_[lists.front()].size;
    const bool are_alike = std::ranges::all_of(lists, [&](std::size_t list) { return parts_[list].size == size; });
    const bool have_tensors = std::ranges::any_of(lists, [&](std::size_t list) { return !rows(list).empty(); });
    if (!have_tensors) return;
    const bool differ = std::ranges::any_of(lists, [&](std::size_t list) { return have_different_rows(list, 2); });
    const bool is_named =
        std::ranges::any_of(lists, [&](std::size_t list) { return rows(list).empty() || holds_dictionaries(list); });
    const bool has_rows =
        std::ranges::any_of(lists, [&](std::size_t list) { return rows(list).contains(parts_[list].size); });
    if (are_alike && size > 0 && (differ || (is_named && !has_rows))) {
      for (const auto list : lists) cut(list);
      return;
    }
    for (const auto list : lists) {
      if (looks_like_pictures(list)) doubt(list);
    }
  }

  // True where a list has so many tensors of one sort, and these have different numbers of rows.
  bool have_different_rows(std::size_t list, std::size_t count) const {
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::int64_t>> rows;
    for (auto place = list + 1; place < parts_[list].end; ++place) {
      if (is_tensor(place)) rows[{parts_[place].dtype, parts_[place].dims}].push_back(parts_[place].size);
    }
    return std::ranges::any_of(rows, [&](const auto& sort) {
      const auto& sizes = sort.second;
      return sizes.size() >= count && std::ranges::adjacent_find(sizes, std::not_equal_to<>()) != sizes.end();
    });
  }

  bool looks_like_pictures(std::size_t list) const {
    const auto held = elements(list);
    if (held.size() < 3 || !std::ranges::all_of(held, [&](std::size_t place) { return is_tensor(place); }))
      return false;
    const auto& first = parts_[held.front()];
    const bool are_alike = std::ranges::all_of(held, [&](std::size_t place) {
      const auto& other = parts_[place];
      return other.dtype == first.dtype && other.dims == first.dims && other.size == first.size;
    });
    const bool are_channels = first.size == 1 || first.size == 3 || first.size == 4;
    return are_alike && first.dims >= 3 && (are_channels || first.size < parts_[list].size);
  }

  std::span<const BatchPart> parts_;
  Lists found_;
};

}  // namespace

Lists lists_of_samples(std::span<const BatchPart> parts) { return Decision(parts).run(); }

}  // namespace lamina::pipeline
