// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/lists.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace lamina::pipeline {
namespace {

using Known = BatchPart::Known;

// A tree of parts, written as it would be in Python.
struct Tree {
  BatchPart::Kind kind;
  std::int64_t size = 0, dims = 2, dtype = 0;
  std::vector<Tree> held;
  Known known = Known::kNot;
};

Tree tensor(std::int64_t rows, std::int64_t dims = 2, std::int64_t dtype = 0) {
  return {BatchPart::Kind::kTensor, rows, dims, dtype, {}};
}
Tree picture() { return tensor(3, 3); }
Tree word() { return {BatchPart::Kind::kOther, 0, 2, 0, {}}; }
Tree list(std::vector<Tree> held, Known known = Known::kNot) {
  const auto size = static_cast<std::int64_t>(held.size());
  return {BatchPart::Kind::kList, size, 2, 0, std::move(held), known};
}
Tree of(std::int64_t count, const Tree& each) { return list(std::vector(count, each)); }
Tree names(std::int64_t count) { return of(count, word()); }
Tree dict(std::vector<Tree> held) { return {BatchPart::Kind::kContainer, 0, 2, 0, std::move(held)}; }

void flatten(const Tree& tree, std::vector<BatchPart>& parts) {
  const auto place = parts.size();
  parts.push_back({tree.kind, tree.size, 0, tree.dtype, tree.dims, tree.known});
  for (const auto& each : tree.held) flatten(each, parts);
  parts[place].end = parts.size();
}

// The lists of a batch in the order of the walk: E for one that is cut by elements, r for another one; "?" where that
// is not clear.
std::string decided(std::initializer_list<Tree> arguments) {
  std::vector<BatchPart> parts;
  for (const auto& each : arguments) flatten(each, parts);
  const auto found = lists_of_samples(parts);
  if (found.not_clear) return "?";
  std::string text;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].kind == BatchPart::Kind::kList) text += found.by_elements[i] ? 'E' : 'r';
  }
  return text;
}

TEST(ListsOfSamples, AListOfTensorsWithTheRowsOfTheBatchIsCutByRows) {
  EXPECT_EQ(decided({list({tensor(8), tensor(8)})}), "r");
  EXPECT_EQ(decided({list({tensor(8), tensor(8, 1)}), tensor(8)}), "r");
  EXPECT_EQ(decided({of(8, tensor(8)), tensor(8)}), "r");  // as many as rows, all of them with rows
  EXPECT_EQ(decided({dict({list({tensor(8), tensor(8)}), tensor(8)})}), "r");
  EXPECT_EQ(decided({of(13, tensor(8)), tensor(8)}), "r");
}

TEST(ListsOfSamples, AListAsLongAsTheBatchWhoseTensorsHaveOtherRowsIsCutByElements) {
  EXPECT_EQ(decided({of(6, picture()), tensor(6, 1)}), "E");
  EXPECT_EQ(decided({list({tensor(5), tensor(7), tensor(9)}), tensor(3, 1)}), "E");
  EXPECT_EQ(decided({dict({of(6, picture()), tensor(6, 1)})}), "E");
  EXPECT_EQ(decided({list({of(6, picture()), tensor(6, 1)})}), "rE");
  EXPECT_EQ(decided({of(1, picture()), tensor(1, 1)}), "E");
}

TEST(ListsOfSamples, NamesBesideRowsAreCutWithThem) {
  EXPECT_EQ(decided({tensor(6), names(6)}), "E");
  EXPECT_EQ(decided({tensor(6), names(5)}), "r");
  EXPECT_EQ(decided({list({tensor(6), names(6)})}), "rE");
  EXPECT_EQ(decided({names(6)}), "r");
  EXPECT_EQ(decided({of(4, picture()), names(4)}), "EE");
}

TEST(ListsOfSamples, ListsOfOneLengthWithTensorsOfSeveralRowsAreSamples) {
  const auto boxes = list({dict({tensor(1)}), dict({tensor(2)}), dict({tensor(1)}), dict({tensor(2)})});
  EXPECT_EQ(decided({of(4, picture()), boxes}), "EE");
  EXPECT_EQ(decided({list({of(4, picture()), boxes})}), "rEE");
  EXPECT_EQ(decided({boxes}), "E");
  EXPECT_EQ(decided({of(4, picture()), of(4, dict({tensor(1)}))}), "EE");
  EXPECT_EQ(decided({list({tensor(8), tensor(8)}), list({tensor(16), tensor(16)})}), "rr");
}

TEST(ListsOfSamples, WhatMayBeEitherIsNotClear) {
  EXPECT_EQ(decided({of(6, picture())}), "?");
  EXPECT_EQ(decided({of(12, tensor(8, 3))}), "?");
  EXPECT_EQ(decided({list({tensor(5), tensor(7), tensor(6)})}), "?");
  EXPECT_EQ(decided({list({tensor(2), tensor(4)}), tensor(2)}), "?");
}

TEST(ListsOfSamples, SamplesOfDifferentRowsAreCutThoughOneHasThoseOfTheBatch) {
  EXPECT_EQ(decided({list({tensor(2), tensor(5)}), tensor(2)}), "E");
  const auto boxes = list({dict({tensor(1)}), dict({tensor(4)}), dict({tensor(3)}), dict({tensor(1)})});
  EXPECT_EQ(decided({tensor(4, 4), boxes}), "E");
  EXPECT_EQ(decided({tensor(1, 4), of(1, dict({tensor(1)}))}), "E");
}

TEST(ListsOfSamples, DictionariesWithTheRowsOfTheBatchAreNotClear) {
  EXPECT_EQ(decided({tensor(2, 4), of(2, dict({tensor(2), tensor(2, 1)}))}), "?");
  EXPECT_EQ(decided({of(4, dict({picture(), word()}))}), "?");
  EXPECT_EQ(decided({of(8, dict({tensor(16, 1)}))}), "?");
  EXPECT_EQ(decided({of(1, dict({picture(), word()}))}), "?");
  EXPECT_EQ(decided({of(2, dict({tensor(8), tensor(8)}))}), "r");
  EXPECT_EQ(decided({of(1, dict({tensor(8), word()}))}), "r");
  EXPECT_EQ(decided({list({tensor(8), dict({tensor(8), word()}), dict({tensor(8)})})}), "r");
  EXPECT_EQ(decided({list({tensor(8), dict({tensor(16), names(8)})})}), "rE");
  EXPECT_EQ(decided({of(2, dict({tensor(8)})), tensor(8, 1)}), "r");
}

TEST(ListsOfSamples, ListsOfOneFormInAListAreSamplesOrNotClear) {
  const auto pair = [](std::int64_t rows, std::int64_t others) { return list({tensor(rows, 1), tensor(others, 1)}); };
  EXPECT_EQ(decided({of(4, list({picture(), word()}))}), "?");
  EXPECT_EQ(decided({of(8, pair(16, 4))}), "?");
  EXPECT_EQ(decided({of(2, pair(16, 4))}), "?");
  EXPECT_EQ(decided({of(12, pair(8, 8))}), "?");
  EXPECT_EQ(decided({of(4, list({picture(), tensor(1, 1)}))}), "Errrr");
  EXPECT_EQ(decided({list({list({tensor(5), word()}), list({tensor(7), word()})})}), "Err");
  EXPECT_EQ(decided({of(2, pair(8, 8))}), "rrr");
  EXPECT_EQ(decided({list({list({tensor(5), tensor(7), tensor(9)}), list({tensor(2), tensor(1), tensor(3)})})}), "rEE");
  EXPECT_EQ(decided({of(12, pair(8, 8)), tensor(8)}), std::string(13, 'r'));
}

TEST(ListsOfSamples, WhatIsKnownOfAListCounts) {
  auto pictures = of(6, picture());
  pictures.known = Known::kRows;
  EXPECT_EQ(decided({pictures}), "r");
  pictures.known = Known::kElements;
  EXPECT_EQ(decided({pictures}), "E");
  EXPECT_EQ(decided({list({tensor(1), tensor(1), tensor(1)}, Known::kRows)}), "r");
  EXPECT_EQ(decided({list({pictures, names(6)}, Known::kRows)}), "rEr");
  EXPECT_EQ(decided({list({pictures, tensor(6), names(6)}, Known::kRows)}), "rEE");
}

}  // namespace
}  // namespace lamina::pipeline
