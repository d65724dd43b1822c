// SPDX-License-Identifier: Apache-2.0
// Members that call different things: every one of them gets an error that shows both calls, no buffer is written, and
// the group goes on.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <memory>
#include <random>
#include <set>

#include "lamina/base/str.h"
#include "lamina/shared_memory/communicator.h"
#include "tests/shared_memory/members.h"

namespace lamina::shared_memory {
namespace {

using base::str;
using layout::DType;

// Arguments that a call may have.
enum Field : unsigned { kKind = 1, kReduction = 2, kRoot = 4, kCount = 8, kDType = 16, kList = 32, kTag = 64 };
constexpr std::array kFields{kKind, kReduction, kRoot, kCount, kDType, kList, kTag};

struct Kind {
  const char* name;
  unsigned fields;  // that it has
};
constexpr unsigned kSized = kKind | kCount | kDType;
// A send is one member's, its receipt the next one's, so only those two kinds belong together.
constexpr std::array<Kind, 10> kKinds{{{"all_reduce", kSized | kReduction | kList},
                                       {"all_gather", kSized | kList},
                                       {"reduce_scatter", kSized | kReduction | kList},
                                       {"reduce", kSized | kReduction | kRoot},
                                       {"broadcast", kSized | kRoot},
                                       {"gather", kSized | kRoot},
                                       {"scatter", kSized | kRoot},
                                       {"all_to_all", kKind | kDType},  // finds its counts in another way
                                       {"barrier", kKind},
                                       {"send", kCount | kDType | kTag}}};
constexpr std::array kReductions{Reduction::kSum, Reduction::kMax, Reduction::kMin};
constexpr std::array kReductionNames{"sum", "maximum", "minimum"};
constexpr std::array kDTypes{DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kInt32};
constexpr std::array<std::size_t, 5> kCounts{0, 1, 24, 5000, 80000};

// A call as data: its arguments, or the number of one in a table.
struct Call {
  unsigned kind = 0, reduction = 0, dtype = 0;
  int root = 0, tag = 0;
  std::vector<std::size_t> counts;  // of one buffer, or of a list

  bool has(Field field) const { return (kKinds[kind].fields & field) != 0; }
  std::string name() const { return kKinds[kind].name; }

  // As messages show it.
  std::string shown(int members, bool receives = false) const {
    if (name() == "barrier") return "barrier";
    const auto type = layout::traits(kDTypes[dtype]).name;
    if (name() == "all_to_all") return str("all_to_all of ", type);
    auto text = str(receives ? "recv" : name(), " of ");
    if (counts.size() > 1) text += str(counts.size(), " buffers: ");
    for (std::size_t i = 0; i < counts.size(); ++i) text += str(i == 0 ? "" : " and ", counts[i], " ", type);
    if (has(kReduction)) text += str(", ", kReductionNames[reduction]);
    const bool from = name() == "broadcast" || name() == "scatter";
    if (has(kRoot)) text += str(from ? ", from " : ", to ", "member ", root, " of ", members);
    if (has(kTag)) text += str(", tag ", tag);
    return text;
  }
};

template <class T, std::size_t N>
const T& pick(const std::array<T, N>& from, std::mt19937& random) {
  return from[random() % N];
}

Call draw(int members, std::mt19937& random) {
  Call call{static_cast<unsigned>(random() % kKinds.size()), static_cast<unsigned>(random() % kReductions.size()),
            static_cast<unsigned>(random() % kDTypes.size())};
  call.root = static_cast<int>(random() % members);
  call.tag = static_cast<int>(random() % 5);
  const std::size_t length = call.has(kList) ? 1 + random() % 3 : 1;
  for (std::size_t i = 0; i < length; ++i) call.counts.push_back(pick(kCounts, random));
  return call;
}

// The call with another value of one argument; `field` says of which.
Call changed(const Call& call, int members, std::mt19937& random, Field& field) {
  do field = pick(kFields, random);
  while (!call.has(field));
  Call other = call;
  switch (field) {
    case kKind:
      do other.kind = random() % kKinds.size();
      while (other.kind == call.kind || other.has(kTag));
      if (!other.has(kList)) other.counts.resize(1);
      break;
    case kReduction:
      other.reduction = (call.reduction + 1 + random() % (kReductions.size() - 1)) % kReductions.size();
      break;
    case kDType:
      other.dtype = (call.dtype + 1 + random() % (kDTypes.size() - 1)) % kDTypes.size();
      break;
    case kRoot:
      other.root = (call.root + 1) % members;
      break;
    case kTag:
      ++other.tag;
      break;
    case kCount: {
      auto& count = other.counts[random() % other.counts.size()];
      const auto before = count;
      while (count == before) count = pick(kCounts, random);
      break;
    }
    case kList:
      other.counts.push_back(pick(kCounts, random));
      break;
  }
  return other;
}

// The buffers of a call: one of each size, and one of a part for every member.
class Buffers {
 public:
  Buffers(Communicator& group, const Call& call, bool in_arena) {
    for (const auto count : call.counts) {
      const auto add = [&](std::size_t elements) {
        Buffer buffer{nullptr, elements, kDTypes[call.dtype]};
        const auto bytes = elements * buffer.element_bytes();
        auto memory = in_arena ? group.allocate(bytes) : nullptr;
        if (!memory) memory = {new std::byte[bytes + 1], std::default_delete<std::byte[]>()};
        buffer.data = memory.get();
        std::fill_n(buffer.data, bytes, kFilled);
        memory_.push_back(std::move(memory));
        return buffer;
      };
      mine.push_back(add(count));
      all.push_back(add(count * group.size()));
      divided.push_back({mine.back(), equal_parts(all.back(), group.size())});
    }
  }
  bool untouched() const {
    const auto filled = [](const Buffer& one) {
      return std::all_of(one.data, one.at(one.count), [](std::byte byte) { return byte == kFilled; });
    };
    return std::ranges::all_of(mine, filled) && std::ranges::all_of(all, filled);
  }

  std::vector<Buffer> mine, all;
  std::vector<Divided> divided;

 private:
  static constexpr std::byte kFilled{7};
  std::vector<std::shared_ptr<std::byte>> memory_;
};

void run(const Call& call, Communicator& group, const Buffers& buffers) {
  const auto kind = call.name();
  const auto how = kReductions[call.reduction];
  const auto& mine = buffers.mine.front();
  const auto& parts = buffers.divided.front().all;
  if (kind == "all_reduce") group.all_reduce(buffers.mine, how, kPatient);
  if (kind == "all_gather") group.all_gather(buffers.divided, kPatient);
  if (kind == "reduce_scatter") group.reduce_scatter(buffers.divided, how, kPatient);
  if (kind == "reduce") group.reduce(mine, how, call.root, kPatient);
  if (kind == "broadcast") group.broadcast(mine, call.root, kPatient);
  if (kind == "gather") group.gather(parts, mine, call.root, kPatient);
  if (kind == "scatter") group.scatter(mine, parts, call.root, kPatient);
  if (kind == "all_to_all") group.all_to_all(parts, parts, kPatient);
  if (kind == "barrier") group.barrier(kPatient);
}

void expect_exact_sum(Communicator& group, int rank) {
  const int members = group.size();
  std::vector<std::int64_t> next(1000, rank + 1);
  group.all_reduce(buffer_of(next, DType::kInt64), Reduction::kSum, kPatient);
  ASSERT_EQ(next, std::vector<std::int64_t>(1000, members * (members + 1) / 2));
}

class Mismatch : public ::testing::TestWithParam<int> {};

// All members draw the same pairs, and each whether its buffers lie in its arena.
TEST_P(Mismatch, InOneArgumentIsAnErrorOfAllThatShowsBothCallsAndWritesNothing) {
  const int members = GetParam();
  const auto ends = together(members, [&](Communicator& group, int rank) {
    std::mt19937 random(20), own(static_cast<unsigned>(rank));
    std::set<std::pair<unsigned, Field>> seen;
    for (int number = 0; number < 400; ++number) {
      const auto common = draw(members, random);
      Field field{};
      const auto odd = changed(common, members, random, field);
      seen.emplace(common.kind, field);
      const int odd_one = static_cast<int>(random() % members), next = (odd_one + 1) % members;
      const bool passes = common.has(kTag), receives = passes && rank == next;
      if (!passes || rank == odd_one || receives) {
        const auto& call = rank == odd_one ? odd : common;
        const Buffers buffers(group, call, own() % 2 == 0);
        const auto error = error_of([&] {
          if (receives) return group.receive(buffers.mine.front(), odd_one, call.tag, kPatient);
          if (passes) return group.send(buffers.mine.front(), next, call.tag, kPatient);
          run(call, group, buffers);
        });
        EXPECT_EQ(error.find("DesyncError: "), 0U) << number << ": " << error;
        EXPECT_NE(error.find(odd.shown(members)), std::string::npos) << error << "\n" << odd.shown(members);
        EXPECT_NE(error.find(common.shown(members, passes)), std::string::npos) << error;
        EXPECT_TRUE(buffers.untouched()) << error;
      }
      expect_exact_sum(group, rank);
    }
    // Every argument of every kind.
    std::size_t expected = 0;
    for (const auto& kind : kKinds) expected += std::popcount(kind.fields);
    EXPECT_EQ(seen.size(), expected);
  });
  EXPECT_EQ(ends, std::vector<std::string>(members));
}

INSTANTIATE_TEST_SUITE_P(Members, Mismatch, ::testing::Values(2, 3),
                         [](const auto& info) { return std::to_string(info.param); });

TEST(MismatchOfCounts, InAnAllToAllIsFoundByAllMembers) {
  constexpr int kMembers = 3;
  std::array<std::string, kMembers> errors;
  const auto ends = together(kMembers, [&](Communicator& group, int rank) {
    std::vector<float> from(2 * kMembers, 1), to((rank == 1 ? 3 : 2) * kMembers, -1);
    const auto untouched = to;
    errors[rank] = error_of([&] {
      group.all_to_all(equal_parts(buffer_of(to, DType::kFloat32), kMembers),
                       equal_parts(buffer_of(from, DType::kFloat32), kMembers), kPatient);
    });
    EXPECT_EQ(to, untouched);
    expect_exact_sum(group, rank);
  });
  EXPECT_EQ(ends, std::vector<std::string>(kMembers));
  for (const auto& error : errors) {
    EXPECT_EQ(error, "DesyncError: all_to_all: member 0 of 3 sends 2 elements to member 1 of 3, which expects 3");
  }
}

}  // namespace
}  // namespace lamina::shared_memory
