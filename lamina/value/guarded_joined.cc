// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/guarded_joined.h"

#include <algorithm>
#include <optional>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

#include "lamina/value/guarded.h"
#include "lamina/value/guarded_slice.h"

namespace lamina::value {
namespace {

using JoinedPart = GuardedSlice::JoinedPart;

// A slice whose dimensions from `dim` on have become others.
SliceOf moved(const SliceOf& slice, int dim, int by) {
  auto same = c10::make_intrusive<GuardedSlice>(*slice);
  if (same->cut.dim >= dim) same->cut.dim += by;
  if (same->along >= dim) same->along += by;
  return same;
}

bool is_whole(const JoinedPart& part) { return !part.slice; }

SliceOf first_slice(std::span<const JoinedPart> parts) { return std::ranges::find_if_not(parts, is_whole)->slice; }

// True where slices lie beside one another with the same cut, as in a list of them.
bool are_cut_alike(std::span<const JoinedPart> parts, int along) {
  const auto& cut = first_slice(parts)->cut;
  return cut.dim >= 0 && cut.dim != along && std::ranges::all_of(parts, [&](const JoinedPart& part) {
           return is_whole(part) || (part.slice->cut.dim == cut.dim && part.slice->cut.extent == cut.extent);
         });
}

SliceOf joined_of(std::vector<JoinedPart> parts, int along) {
  const auto first = first_slice(parts);
  if (are_cut_alike(parts, along)) return first;
  auto joined = c10::make_intrusive<GuardedSlice>(*first);
  joined->cut.dim = WhereCut::kJoined;
  joined->parts = std::move(parts);
  joined->along = along;
  return joined;
}

// The parts whose places these are, none for those of wholes before the first slice; nullopt where one has others, too.
std::optional<std::span<const JoinedPart>> parts_at(const GuardedSlice& joined, const PlacesAlong& places) {
  std::int64_t all = 0, before_slices = 0;
  for (const auto& part : joined.parts) all += part.size;
  for (const auto& part : joined.parts | std::views::take_while(is_whole)) before_slices += part.size;
  const auto from_first = [all](std::int64_t at) { return std::clamp<std::int64_t>(at < 0 ? at + all : at, 0, all); };
  const auto begin = from_first(places.begin), end = std::max(begin, from_first(places.end));
  if (end <= before_slices) return std::span<const JoinedPart>();
  std::int64_t at = 0;
  auto first = joined.parts.begin();
  while (at < begin) at += (first++)->size;
  auto last = first;
  if (at != begin || places.step != 1) return std::nullopt;
  while (at < end) at += (last++)->size;
  if (at != end) return std::nullopt;
  return std::span<const JoinedPart>(first, last);
}

}  // namespace

void guard_joined(const at::Tensor& made, at::TensorList tensors, std::int64_t dim, bool stacks) {
  const auto along = static_cast<int>(dim < 0 ? dim + made.dim() : dim);
  std::vector<JoinedPart> parts;
  for (const auto& each : tensors) {
    if (!stacks && each.dim() != made.dim()) continue;  // an empty one, which torch leaves out
    auto slice = is_guarded(each) ? slice_of(each) : SliceOf();
    if (slice && stacks) slice = moved(slice, along, 1);
    parts.push_back({stacks ? 1 : each.size(along), std::move(slice)});
  }
  guard(made, joined_of(std::move(parts), along));
}

bool has_parts_at(const at::Tensor& joined, const PlacesAlong& places) {
  const auto slice = slice_of(joined);
  if (places.dim == slice->along) return parts_at(*slice, places).has_value();
  return std::ranges::all_of(slice->parts, [&](const JoinedPart& part) {
    return is_whole(part) || (part.slice->cut.dim >= 0 && part.slice->cut.dim != places.dim);
  });
}

void guard_parts(const at::Tensor& view, const at::Tensor& joined, const PlacesAlong& places) {
  const auto slice = slice_of(joined);
  const auto parts = places.dim == slice->along ? parts_at(*slice, places) : std::nullopt;
  if (!parts) return guard(view, with_cut(slice, WhereCut::kTorn));
  if (std::ranges::all_of(*parts, is_whole)) return set_keys(view, view.key_set().remove(kWrapperKey));
  auto found = parts->size() == 1 ? parts->front().slice : joined_of({parts->begin(), parts->end()}, slice->along);
  if (view.dim() < joined.dim()) {
    const bool is_lost = found->cut.dim == places.dim || found->cut.dim == WhereCut::kJoined;
    found = is_lost ? with_cut(found, WhereCut::kTorn) : moved(found, places.dim + 1, -1);
  }
  guard(view, std::move(found));
}

}  // namespace lamina::value
