// SPDX-License-Identifier: Apache-2.0
// Members that call different things: every one of them gets an error that shows both calls, no buffer is written, and
// the group goes on.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "lamina/shared_memory/communicator.h"
#include "tests/shared_memory/members.h"

namespace lamina::shared_memory {
namespace {

using layout::DType;

// A collective with its arguments, as data.
struct Call {
  std::string kind;
  std::size_t count;
  DType dtype;
  Reduction reduction;
  int root;

  // The arguments that this kind has, as messages show them.
  bool same_as(const Call& other) const {
    const bool sums = kind == "all_reduce" || kind == "reduce" || kind == "reduce_scatter";
    const bool rooted = kind == "reduce" || kind == "broadcast" || kind == "gather" || kind == "scatter";
    if (kind != other.kind) return false;
    if (kind == "barrier") return true;
    return count == other.count && dtype == other.dtype && (!sums || reduction == other.reduction) &&
           (!rooted || root == other.root);
  }
};

constexpr int kMembers = 3;

void run(const Call& call, Communicator& group, Buffer all, Buffer mine) {
  if (call.kind == "all_reduce") group.all_reduce(mine, call.reduction, kPatient);
  if (call.kind == "reduce") group.reduce(mine, call.reduction, call.root, kPatient);
  if (call.kind == "broadcast") group.broadcast(mine, call.root, kPatient);
  const auto parts = equal_parts(all, kMembers);
  if (call.kind == "all_gather") group.all_gather(parts, mine, kPatient);
  if (call.kind == "gather") group.gather(parts, mine, call.root, kPatient);
  if (call.kind == "reduce_scatter") group.reduce_scatter(mine, parts, call.reduction, kPatient);
  if (call.kind == "scatter") group.scatter(mine, parts, call.root, kPatient);
  if (call.kind == "barrier") group.barrier(kPatient);
}

template <class T, std::size_t N>
const T& pick(const std::array<T, N>& from, std::mt19937& random) {
  return from[random() % N];
}

Call draw(std::mt19937& random) {
  static const std::array<std::string, 8> kKinds{"all_reduce", "reduce",         "broadcast", "all_gather",
                                                 "gather",     "reduce_scatter", "scatter",   "barrier"};
  constexpr std::array<std::size_t, 5> kCounts{0, 1, 24, 5000, 100000};
  constexpr std::array kDTypes{DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kInt32};
  constexpr std::array kReductions{Reduction::kSum, Reduction::kMean, Reduction::kMax};
  return {pick(kKinds, random), pick(kCounts, random), pick(kDTypes, random), pick(kReductions, random),
          static_cast<int>(random() % kMembers)};
}

TEST(Mismatch, IsAnErrorOfAllMembersThatShowsBothCallsAndWritesNothing) {
  std::mt19937 random(20);
  for (int number = 0; number < 400; ++number) {
    const Call common = draw(random);
    Call odd = draw(random);
    while (odd.same_as(common)) odd = draw(random);
    const int odd_one = static_cast<int>(random() % kMembers);
    std::array<std::string, kMembers> errors;
    const auto ends = together(kMembers, [&](Communicator& group, int rank) {
      const auto& call = rank == odd_one ? odd : common;
      const auto size_of = static_cast<std::size_t>(layout::traits(call.dtype).size_bytes);
      std::vector<std::byte> all(call.count * kMembers * size_of, std::byte{7}),
          mine(call.count * size_of, std::byte{5});
      const auto all_before = all, mine_before = mine;
      errors[rank] = error_of([&] {
        run(call, group, {all.data(), call.count * kMembers, call.dtype}, {mine.data(), call.count, call.dtype});
      });
      EXPECT_EQ(all, all_before);
      EXPECT_EQ(mine, mine_before);
      std::vector<std::int64_t> next(1000, rank + 1);
      group.all_reduce(buffer_of(next, DType::kInt64), Reduction::kSum, kPatient);
      EXPECT_EQ(next, std::vector<std::int64_t>(1000, kMembers * (kMembers + 1) / 2));
    });
    ASSERT_EQ(ends, std::vector<std::string>(kMembers));
    for (int rank = 0; rank < kMembers; ++rank) {
      EXPECT_EQ(errors[rank].find("DesyncError"), 0U) << number << ": " << errors[rank];
      EXPECT_NE(errors[rank].find(odd.kind), std::string::npos) << errors[rank];
      EXPECT_NE(errors[rank].find(common.kind), std::string::npos) << errors[rank];
    }
  }
}

TEST(Mismatch, OfCountsInAnAllToAllIsFoundByAllMembers) {
  std::array<std::string, kMembers> errors;
  const auto ends = together(kMembers, [&](Communicator& group, int rank) {
    std::vector<float> from(2 * kMembers, 1), to((rank == 1 ? 3 : 2) * kMembers, -1);
    const auto untouched = to;
    errors[rank] = error_of([&] {
      group.all_to_all(equal_parts(buffer_of(to, DType::kFloat32), kMembers),
                       equal_parts(buffer_of(from, DType::kFloat32), kMembers), kPatient);
    });
    EXPECT_EQ(to, untouched);
    group.barrier(kPatient);
  });
  EXPECT_EQ(ends, std::vector<std::string>(kMembers));
  for (const auto& error : errors) {
    EXPECT_EQ(error, "DesyncError: all_to_all: member 0 of 3 sends 2 elements to member 1 of 3, which expects 3");
  }
}

TEST(Mismatch, OfASendAndItsReceiptIsFoundByBoth) {
  std::array<std::string, 2> errors;
  const auto ends = together(2, [&](Communicator& group, int rank) {
    std::vector<float> elements(rank == 0 ? 10 : 12);
    errors[rank] = error_of([&] {
      if (rank == 0) group.send(buffer_of(elements, DType::kFloat32), 1, 0, kPatient);
      if (rank == 1) group.receive(buffer_of(elements, DType::kFloat32), 0, 0, kPatient);
    });
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
  for (const auto& error : errors) {
    EXPECT_EQ(error.find("DesyncError"), 0U) << error;
    EXPECT_NE(error.find("10 float32"), std::string::npos) << error;
    EXPECT_NE(error.find("12 float32"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace lamina::shared_memory
