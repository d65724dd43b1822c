// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/held_pieces.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/chunks.h"
#include "lamina/checkpoint/packed_parts.h"
#include "lamina/layout/common.h"
#include "tests/message_of.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::checkpoint {
namespace {

using layout::Region;
using layout::Shape;
using messaging::Mailboxes;

Peers peers_of(Mailboxes& boxes, int rank) {
  return {boxes.ranks(), boxes[rank], base::Patience{std::chrono::seconds(30)}};
}

// Columns of a matrix, cut over so many.
Region columns(const Shape& shape, int of, int index) {
  const auto width = shape[1] / of;
  const auto size = shape[0] * width;
  return {shape, 1, {{index * width, 0, width}}, width, 0, size, size};
}

// Elements that follow each other, cut over so many.
Region elements(const Shape& shape, int of, int index) {
  const auto share = layout::share_of(layout::numel(shape), of, index);
  return within(layout::whole(shape), share.begin, share.end);
}

Region none(const Shape& shape) { return within(layout::whole(shape), 0, 0); }

at::Tensor piece_of(const at::Tensor& whole, const Region& region) {
  auto piece = at::empty({count(region)}, whole.scalar_type());
  layout::CommonRuns runs(layout::whole(region.whole), region);
  while (const auto run = runs.next()) {
    piece.narrow(0, run->to, run->count).copy_(whole.flatten().narrow(0, run->from, run->count));
  }
  return piece;
}

Part part_of(const std::string& name, const at::Tensor& whole, Region region) {
  auto part = whole_part(name, archive::Kind::kParameter, whole);
  region.size = count(region);
  part.elements = piece_of(whole, region);
  part.region = std::move(region);
  return part;
}

using Cut = std::function<Region(const Shape&, int rank)>;

// Brings a tensor that `before` has cut to where `after` wants it, and compares. Returns what the ranks have thrown.
std::vector<std::exception_ptr> move(Mailboxes& boxes, const at::Tensor& whole, const Cut& before, const Cut& after,
                                     std::vector<std::uint64_t>* received = nullptr) {
  return boxes.run([&](int rank) {
    const auto shape = whole.sizes().vec();
    std::vector<Part> own;
    if (const auto region = before(shape, rank); count(region) > 0) own.push_back(part_of("w", whole, region));
    HeldPieces pieces(peers_of(boxes, rank), own, {});
    pieces.read_with(peers_of(boxes, rank));
    const auto wanted = after(shape, rank);
    const auto into = at::full({count(wanted)}, -1, whole.options());
    const archive::Wanted wish{&pieces.manifest().tensors.front(), wanted, bytes_of(into)};
    pieces.read({&wish, 1}, [] {});
    if (count(wanted) > 0) {
      EXPECT_TRUE(at::equal(into, piece_of(whole, wanted)));
    }
    if (received != nullptr) (*received)[rank] = pieces.received_bytes();
  });
}

void expect_well(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors)
    EXPECT_EQ(error, nullptr) << message_of<std::exception>([&] { std::rethrow_exception(error); });
}

TEST(HeldPieces, ARankMayHaveSeveralPartsOfATensor) {
  Mailboxes boxes(2);
  const auto whole = at::arange(36, at::kInt).view({6, 6});
  boxes.run([&](int rank) {
    const auto shape = whole.sizes().vec();
    std::vector<Part> own{part_of("w", whole, elements(shape, 3, rank))};
    if (rank == 0) own.push_back(part_of("w", whole, elements(shape, 3, 2)));  // of a rank that is lost
    HeldPieces pieces(peers_of(boxes, rank), own, {});
    pieces.read_with(peers_of(boxes, rank));
    const auto wanted = columns(shape, 2, rank);
    const auto into = at::full({count(wanted)}, -1, whole.options());
    const archive::Wanted wish{&pieces.manifest().tensors.front(), wanted, bytes_of(into)};
    pieces.read({&wish, 1}, [] {});
    EXPECT_TRUE(at::equal(into, piece_of(whole, wanted)));
  });
}

TEST(PackedParts, ComeBackAsTheyWere) {
  const auto whole = at::arange(36, at::kInt).view({6, 6});
  const auto shape = whole.sizes().vec();
  const std::vector<Part> parts{part_of("w", whole, columns(shape, 3, 1)), part_of("v", whole, none(shape))};
  const auto found = unpack(text_of_parts(parts), pack(parts));
  ASSERT_EQ(found.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(hash_of(found[i]), hash_of(parts[i]));
    EXPECT_EQ(found[i].tensor, parts[i].tensor);
    EXPECT_TRUE(at::equal(found[i].elements, parts[i].elements));
  }
  EXPECT_NE(hash_of(parts[0]), hash_of(part_of("w", whole, columns(shape, 3, 2))));
  EXPECT_TRUE(unpack(text_of_parts({}), pack({})).empty());
}

TEST(PackedParts, AreRefusedWhereTheyAreDamaged) {
  const auto whole = at::arange(36, at::kInt).view({6, 6});
  const std::vector<Part> parts{part_of("w", whole, columns(whole.sizes().vec(), 3, 1))};
  const auto packed = pack(parts);
  parts.front().elements.add_(1);  // the same memory
  EXPECT_NE(message_of<base::FormatError>([&] {
              unpack(text_of_parts(parts), packed);
            }).find("w, which was kept for a rank that is lost, is not what that had"),
            std::string::npos);
}

TEST(HeldPieces, GoFromAnyLayoutToAnyOther) {
  constexpr int kRanks = 4;
  const std::vector<Cut> cuts{
      [](const Shape& shape, int rank) { return columns(shape, kRanks, rank); },
      [](const Shape& shape, int rank) { return elements(shape, kRanks, rank); },
      [](const Shape& shape, int rank) { return elements(shape, kRanks, kRanks - 1 - rank); },
      [](const Shape& shape, int rank) { return rank == 2 ? layout::whole(shape) : none(shape); },
      [](const Shape& shape, int rank) { return rank < 2 ? columns(shape, 2, rank) : none(shape); },
  };
  const auto whole = at::arange(12 * 20, at::kDouble).view({12, 20});
  for (const auto& before : cuts) {
    for (const auto& after : cuts) {
      Mailboxes boxes(kRanks, /*seed=*/7);
      expect_well(move(boxes, whole, before, after));
    }
    Mailboxes boxes(kRanks);
    expect_well(move(boxes, whole, before, [](const Shape& shape, int) { return layout::whole(shape); }));
  }
}

TEST(HeldPieces, OfThisRankDoNotTravelAndThoseOfOthersDoOnce) {
  Mailboxes boxes(3);
  const auto whole = at::arange(9 << 20, at::kFloat).view({9 << 10, 1 << 10});  // more than goes in one portion
  const auto cut = [](const Shape& shape, int rank) { return elements(shape, 3, rank); };
  std::vector<std::uint64_t> received(3);
  expect_well(move(boxes, whole, cut, cut, &received));
  EXPECT_EQ(received, std::vector<std::uint64_t>(3, 0));
  expect_well(move(boxes, whole, cut, [](const Shape& shape, int) { return layout::whole(shape); }, &received));
  EXPECT_EQ(received, std::vector<std::uint64_t>(3, whole.nbytes() / 3 * 2));
}

TEST(HeldPieces, AreRefusedTogetherWhereElementsAreMissing) {
  Mailboxes boxes(2);
  const auto whole = at::arange(12, at::kDouble).view({3, 4});
  const auto errors = move(
      boxes, whole, [](const Shape& shape, int rank) { return rank == 0 ? elements(shape, 2, 0) : none(shape); },
      [](const Shape& shape, int) { return layout::whole(shape); });
  for (const auto& error : errors) {
    EXPECT_NE(message_of<std::exception>([&] { std::rethrow_exception(error); }).find("are in no piece"),
              std::string::npos);
  }
}

TEST(HeldPieces, AnErrorOfARankComesToThoseItOwesAndNobodyWaits) {
  Mailboxes boxes(3);
  const auto whole = at::arange(12, at::kDouble).view({3, 4});
  const auto errors = move(
      boxes, whole, [](const Shape& shape, int rank) { return rank == 1 ? layout::whole(shape) : none(shape); },
      [](const Shape& shape, int rank) { return layout::whole(rank == 1 ? Shape{5} : shape); });
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_NE(message_of<std::exception>([&] { std::rethrow_exception(error); }).find("shape"), std::string::npos);
  }
}

}  // namespace
}  // namespace lamina::checkpoint
