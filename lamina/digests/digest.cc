// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/digest.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

namespace lamina::digests {
namespace {

// Mixes all bits of a number (the finaliser of SplitMix64).
std::uint64_t mixed(std::uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

double sign(std::uint64_t bits, int projection = 0) { return (bits >> projection & 1) != 0 ? 1 : -1; }

// Two numbers, which every processor of 64 bits takes at once.
using Pair [[gnu::vector_size(2 * sizeof(double))]] = double;

Pair load(const double* numbers) {
  Pair loaded;
  std::memcpy(&loaded, numbers, sizeof loaded);
  return loaded;
}

struct Signs {
  std::array<double, kBlock> of_place;
  std::array<std::array<double, kProjections>, kLanes> of_lane;
};

const Signs& signs() {
  static const auto made = [] {
    Signs all;
    for (std::int64_t place = 0; place < kBlock; ++place) all.of_place[place] = sign(mixed(place));
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < kProjections; ++i) all.of_lane[lane][i] = sign(mixed(kBlock + lane), i);
    }
    return all;
  }();
  return made;
}

double sign_of_block(std::int64_t block, int projection) {
  return sign(mixed(~static_cast<std::uint64_t>(block)), projection);
}

// The sums of a block, whatever its own sign.
class Sums {
 public:
  // Takes elements at these places of the block.
  void add(const double* numbers, std::int64_t begin, std::int64_t end) {
    std::int64_t at = begin;
    for (; at < end && at % kLanes != 0; ++at) add_one(*numbers++, at);
    if (const std::int64_t rows = (end - at) / kLanes; rows > 0) {
      for (std::int64_t lane = 0; lane < kLanes; lane += kAtOnce) add_rows(numbers + lane, at + lane, rows);
      numbers += rows * kLanes, at += rows * kLanes;
    }
    for (; at < end; ++at) add_one(*numbers++, at);
  }

  double squares() const { return squares_; }
  double largest() const { return std::sqrt(largest_square_); }
  double projection(int number) const { return projections_[number / 2][number % 2]; }

 private:
  static constexpr std::int64_t kPairs = 2;  // whose sums stay in registers
  static constexpr std::int64_t kAtOnce = 2 * kPairs;

  // Adds up so many rows of a few lanes, of which the first element is at that place.
  void add_rows(const double* numbers, std::int64_t at, std::int64_t rows) {
    const double* sign = signs_.of_place.data() + at;
    std::array<Pair, kPairs> sums{}, squares{}, most{};
    for (; rows > 0; --rows, numbers += kLanes, sign += kLanes) {
      for (std::int64_t pair = 0; pair < kPairs; ++pair) {
        const Pair each = load(numbers + 2 * pair), square = each * each;
        sums[pair] += each * load(sign + 2 * pair);
        squares[pair] += square;
        most[pair] = most[pair] > square ? most[pair] : square;
      }
    }
    for (std::int64_t lane = 0; lane < kAtOnce; ++lane) {
      project(sums[lane / 2][lane % 2], at + lane);
      squares_ += squares[lane / 2][lane % 2];
      largest_square_ = std::max(largest_square_, most[lane / 2][lane % 2]);
    }
  }

  void add_one(double number, std::int64_t at) {
    project(number * signs_.of_place[at], at);
    squares_ += number * number;
    largest_square_ = std::max(largest_square_, number * number);
  }

  // Adds a number with the signs of the lane of that place.
  void project(double number, std::int64_t at) {
    const double* sign = signs_.of_lane[at % kLanes].data();
    for (std::int64_t pair = 0; pair < kProjections / 2; ++pair) projections_[pair] += number * load(sign + 2 * pair);
  }

  const Signs& signs_ = signs();
  double squares_ = 0, largest_square_ = 0;
  std::array<Pair, kProjections / 2> projections_{};
};

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

double distance(const Digest& first, const Digest& second) {
  double squares = 0;
  for (int i = 0; i < kProjections; ++i) squares += std::pow(first.projections[i] - second.projections[i], 2);
  return std::max(std::abs(first.norm() - second.norm()), std::sqrt(squares / kProjections));
}

double sign_of(std::int64_t place, int projection) {
  return signs().of_place[place % kBlock] * signs().of_lane[place % kLanes][projection] *
         sign_of_block(place / kBlock, projection);
}

void add(Digest& digest, std::int64_t place, std::span<double> numbers) {
  const std::int64_t begin = place % kBlock, end = begin + static_cast<std::int64_t>(numbers.size());
  std::optional<Sums> sums(std::in_place);
  sums->add(numbers.data(), begin, end);
  if (!std::isfinite(sums->squares())) {
    for (double& number : numbers) {
      if (std::isfinite(number)) continue;
      ++digest.not_finite;
      number = 0;
    }
    sums.emplace().add(numbers.data(), begin, end);
  }
  digest.squares += sums->squares();
  digest.largest = std::max(digest.largest, sums->largest());
  for (int i = 0; i < kProjections; ++i)
    digest.projections[i] += sums->projection(i) * sign_of_block(place / kBlock, i);
}

}  // namespace lamina::digests
