// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/pieces.h"

#include <algorithm>
#include <numeric>

#include "lamina/base/error.h"

namespace lamina::pipeline {

Pieces::Pieces(std::span<const std::int64_t> sizes, int microbatches, bool needs_all)
    : microbatches_(microbatches), distinct_(microbatches), cuts_(!sizes.empty()) {
  if (!cuts_) return;
  rows_ = sizes.front();
  if (microbatches == 1) return;
  const auto shortest = std::ranges::min_element(sizes);
  const auto is_multiple = [&](std::int64_t size) { return *shortest == 0 ? size == 0 : size % *shortest == 0; };
  units_ = *shortest;
  if (const auto other = std::ranges::find_if_not(sizes, is_multiple); other != sizes.end()) {
    units_ = std::reduce(sizes.begin(), sizes.end(), std::int64_t{0}, std::gcd<std::int64_t, std::int64_t>);
    // The shortest is the one to keep whole, as weights of classes are, unless it comes first.
    auto misfit = static_cast<std::size_t>(shortest - sizes.begin());
    auto beside = static_cast<std::size_t>(other - sizes.begin());
    if (misfit == 0) std::swap(misfit, beside);
    if (units_ % microbatches != 0) misfit_ = {misfit, beside};
  }
  if (units_ > 0) distinct_ = static_cast<int>(std::min<std::int64_t>(microbatches, units_));
  if (!needs_all) microbatches_ = distinct_;
}

Pieces::Piece Pieces::of(std::int64_t size, base::Microbatch microbatch) const {
  if (microbatches_ == 1) return {0, size};
  if (units_ == 0) return {0, 0};
  base::internal_check(size % units_ == 0, "a tensor that is cut beside others that it fits");
  const auto piece = std::min<std::int64_t>(microbatch.value, distinct_ - 1);
  const auto least = units_ / distinct_, more = units_ % distinct_;
  const auto begin = least * piece + std::min(piece, more);
  const auto length = least + (piece < more ? 1 : 0);
  const auto rows = size / units_;
  return {begin * rows, length * rows};
}

std::vector<std::int64_t> Pieces::samples() const {
  std::vector<std::int64_t> samples;
  for (int i = 0; cuts_ && i < distinct_; ++i) samples.push_back(of(rows_, base::Microbatch(i)).length);
  if (cuts_) samples.resize(microbatches_, 0);
  return samples;
}

std::size_t counted(std::span<const std::int64_t> samples, std::size_t microbatches) {
  const auto repeated = std::ranges::find(samples, 0);
  return repeated == samples.begin() || repeated == samples.end() ? microbatches : repeated - samples.begin();
}

double share(std::span<const std::int64_t> samples, base::Microbatch microbatch, int microbatches, const Copies& all,
             double scale) {
  const auto own = std::reduce(samples.begin(), samples.end(), std::int64_t{0});
  const auto [count, total] = all.samples < 0 ? Copies{1, own} : all;
  if (samples.empty() || total == 0) return scale / microbatches;
  return scale * (static_cast<double>(samples[microbatch.value]) * count) / static_cast<double>(total);
}

}  // namespace lamina::pipeline
