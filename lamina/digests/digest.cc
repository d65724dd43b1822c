// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/digest.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace lamina::digests {
namespace {

// Mixes all bits of a number (the finaliser of SplitMix64).
std::uint64_t mixed(std::uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

double sign(std::uint64_t bits, int projection) { return (bits >> projection & 1) != 0 ? 1 : -1; }

}  // namespace

std::int64_t Digest::whole() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

double Digest::norm() const { return std::sqrt(squares); }

void add(Digest& part, const Digest& next) {
  part.elements += next.elements;
  part.squares += next.squares;
  for (int i = 0; i < kProjections; ++i) part.projections[i] += next.projections[i];
  part.not_finite += next.not_finite;
  part.largest = std::max(part.largest, next.largest);
  part.small += next.small;
  part.bits += next.bits;
}

const std::array<Signs, kProjections>& signs_in_block() {
  static const auto signs = [] {
    std::array<Signs, kProjections> all;
    for (int i = 0; i < kProjections; ++i) {
      for (std::int64_t at = 0; at < kBlock; ++at) all[i][at] = sign(mixed(at), i);
    }
    return all;
  }();
  return signs;
}

double sign_of_block(std::int64_t block, int projection) {
  return sign(mixed(~static_cast<std::uint64_t>(block)), projection);
}

}  // namespace lamina::digests
