// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/heads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::tensor_parallel {
namespace {

using testing::HasSubstr;
using testing::Pair;
using testing::UnorderedElementsAre;
using Numbers = std::vector<std::int64_t>;

Heads heads(std::int64_t count, std::int64_t keys, int degree) {
  const ParentModule module{
      "attention",
      "Attention",
      false,
      {{"num_heads", count}, {"num_key_value_heads", keys}, {"num_key_value_groups", 9}, {"head_dim", 4}}};
  return *heads_of(module, {4 * count, 4 * keys}, {4 * count}, degree);
}

struct Shared {
  std::int64_t count, keys;
  int degree;
  Numbers own;
  std::vector<Numbers> own_keys;
};

class HeadsOfMembers : public testing::TestWithParam<Shared> {};

TEST_P(HeadsOfMembers, ComeWithTheirKeys) {
  const auto& wanted = GetParam();
  const auto found = heads(wanted.count, wanted.keys, wanted.degree);
  for (int member = 0; member < wanted.degree; ++member) {
    const auto own = wanted.own[static_cast<std::size_t>(member)];
    const auto& keys = wanted.own_keys[static_cast<std::size_t>(member)];
    const auto keys_here = static_cast<std::int64_t>(keys.size());
    EXPECT_EQ(found.own(member).count(), own);
    EXPECT_EQ(found.own_keys(member), keys);
    EXPECT_THAT(found.numbers(member),
                UnorderedElementsAre(Pair("num_heads", own), Pair("num_key_value_heads", keys_here),
                                     Pair("num_key_value_groups", own / keys_here)));
  }
  EXPECT_EQ(found.are_shared_keys(4 * wanted.keys), wanted.keys < wanted.degree);
  EXPECT_FALSE(found.are_shared_keys(4 * wanted.count));
}

INSTANTIATE_TEST_SUITE_P(
    All, HeadsOfMembers,
    testing::Values(Shared{8, 8, 2, {4, 4}, {{0, 1, 2, 3}, {4, 5, 6, 7}}}, Shared{8, 2, 2, {4, 4}, {{0}, {1}}},
                    Shared{6, 3, 2, {4, 2}, {{0, 1}, {2}}},  // no group is torn
                    Shared{5, 5, 3, {2, 2, 1}, {{0, 1}, {2, 3}, {4}}},
                    Shared{8, 2, 4, {2, 2, 2, 2}, {{0}, {0}, {1}, {1}}},                 // neighbours have the same
                    Shared{12, 3, 4, {3, 3, 3, 3}, {{0}, {0, 1, 1}, {1, 1, 2}, {2}}}));  // one for each head

std::string refused(std::int64_t count, std::int64_t keys, int degree) {
  try {
    heads(count, keys, degree);
  } catch (const base::UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Heads, AMemberWithoutAnyIsAnError) {
  EXPECT_THAT(refused(6, 6, 4), HasSubstr("with tensor_parallel_degree: 4 some rank would have none"));
  EXPECT_THAT(refused(6, 4, 2), HasSubstr("which does not divide that"));
}

TEST(Heads, AModuleWithoutNumbersMaySayTheFeaturesOfOne) {
  EXPECT_FALSE(heads_of({}, {8}, {8}, 2));
  const auto found = *heads_of({"", "Attention", false, {{"head_size", 4}}}, {72}, {24}, 2);
  EXPECT_EQ(found.count, 6);
  EXPECT_EQ(found.keys, 6);
  EXPECT_EQ(found.unit_of("fused", 72), 12);
  EXPECT_TRUE(found.numbers(0).empty());
}

TEST(Heads, ANumberThatIsSaidCountsWhereItDividesTheSizes) {
  EXPECT_FALSE(heads_of({}, {8}, {8}, 2, SaidHeads{"", 3}));
  EXPECT_EQ(heads_of({}, {8}, {8}, 2, SaidHeads{"", 4})->width, 2);
  const auto named = *heads_of({}, {12}, {12}, 2, SaidHeads{"config.heads", 6});
  EXPECT_THAT(named.numbers(1), UnorderedElementsAre(Pair("config.heads", 3)));
  EXPECT_FALSE(heads_of({}, {12}, {12}, 2, SaidHeads{"config.heads", 0}));
}

TEST(Heads, SizesOfAllHeadsAreThoseOfAMember) {
  const ParentModule module{
      "", "Attention", false, {{"n_head", 4}, {"split_size", 32}, {"inner_dim", 30}, {"hidden", 32}}};
  EXPECT_THAT(heads_of(module, {96}, {32}, 2)->numbers(0),
              UnorderedElementsAre(Pair("n_head", 2), Pair("split_size", 16)));
}

}  // namespace
}  // namespace lamina::tensor_parallel
