// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <random>

#include "lamina/base/error.h"
#include "tests/transport/sample_message.h"

namespace lamina::transport {
namespace {

using testing::sample;

constexpr std::size_t kPrefix = 24;

Message unpacked(Frame frame) { return unpack(frame.head, std::move(frame.buffers)); }

TEST(Message, ArrivesWithEveryField) {
  const auto sent = sample();
  const auto got = unpacked(pack(sent));
  EXPECT_EQ(got.kind, sent.kind);
  EXPECT_EQ(got.call, sent.call);
  EXPECT_EQ(got.fields, sent.fields);
  const auto& body = got.body.as<value::List>().items;
  EXPECT_TRUE(at::equal(body.at(0).as<at::Tensor>(), at::arange(10)));
  EXPECT_EQ(body.at(1).as<std::string>(), "text");
  EXPECT_TRUE(at::equal(body.at(2).as<at::Tensor>(), at::arange(3, at::kDouble)));
}

TEST(Message, ArrivesAsTheKindThatItIs) {
  for (const Kind kind : {Kind("a"), Kind("end of step"), Kind("twelve chars")}) {
    Message message;
    message.kind = kind;
    EXPECT_EQ(unpacked(pack(message)).kind.words(), kind.words());
  }
}

TEST(Frame, OfAKindThatIsNoWordIsMalformed) {
  const auto head = pack(sample()).head;
  const auto with_kind = [&](std::string_view letters) {
    auto other = head;
    std::fill_n(other.begin() + 8, Kind::kMostLetters, '\0');
    return other.replace(8, letters.size(), letters);
  };
  using namespace std::string_view_literals;
  EXPECT_NO_THROW(buffer_specs(with_kind("any word")));
  for (const auto letters : {""sv, " word"sv, "Word"sv, "word2"sv, "\xff"sv, "wo\0rd"sv, "\0word"sv, "wo\nrd"sv}) {
    EXPECT_THROW(buffer_specs(with_kind(letters)), base::FormatError) << letters;
  }
  EXPECT_THROW(buffer_specs(pack({}).head), base::FormatError) << "of no kind";
}

TEST(Frame, TheHeadTellsTheSizesOfTheBuffersBeforeTheyCome) {
  const auto frame = pack(sample());
  const auto specs = buffer_specs(frame.head);
  ASSERT_EQ(specs.size(), 2);
  EXPECT_EQ(specs[0].size_bytes, 80);
  EXPECT_EQ(specs[1].size_bytes, 24);
  EXPECT_EQ(specs[0].device, at::Device(at::kCPU));
}

TEST(Frame, OfAnotherMagicOrVersionOrTooShortIsMalformed) {
  const auto head = pack(sample()).head;
  for (std::size_t i = 0; i < 6; ++i) {  // magic and version
    auto other = head;
    other[i] = static_cast<char>(other[i] + 1);
    EXPECT_THROW(buffer_specs(other), base::FormatError) << i;
  }
  for (std::size_t size = 0; size < kPrefix; ++size) {
    EXPECT_THROW(buffer_specs(head.substr(0, size)), base::FormatError) << size;
  }
}

TEST(Frame, OfAnotherLengthThanItSaysIsMalformed) {
  const auto head = pack(sample()).head;
  for (std::size_t size = kPrefix; size < head.size(); ++size) {
    EXPECT_THROW(buffer_specs(head.substr(0, size)), base::FormatError) << size;
  }
  EXPECT_THROW(buffer_specs(head + "x"), base::FormatError);
}

TEST(Frame, WithOtherBuffersThanItsHeadSaysIsMalformed) {
  const auto frame = pack(sample());
  EXPECT_THROW(unpack(frame.head, {}), base::FormatError);
  EXPECT_THROW(unpack(frame.head, {frame.buffers[1], frame.buffers[0]}), base::FormatError);
  auto more = frame.buffers;
  more.push_back(more[0]);
  EXPECT_THROW(unpack(frame.head, more), base::FormatError);
}

// LAMINA_SOAK multiplies the rounds.
int rounds() { return std::getenv("LAMINA_SOAK") != nullptr ? 3000000 : 100000; }

TEST(FrameFuzz, DamagedHeadsAreAMessageOrAFormatError) {
  const auto frame = pack(sample());
  std::mt19937_64 random(1);
  for (int i = 0; i < rounds() && !::testing::Test::HasFailure(); ++i) {
    auto head = frame.head;
    for (auto left = random() % 3; left < 3; ++left) {
      const auto at = 6 + random() % (head.size() - 6);
      head[at] = static_cast<char>(random());
      if (random() % 4 == 0 && at + 8 <= head.size() && at >= kPrefix) {
        std::memset(&head[at], random() % 2 ? 0xff : 0x7f, 8);
      }
    }
    if (random() % 4 == 0) head.resize(kPrefix + random() % (head.size() - kPrefix));
    const auto rest = static_cast<std::uint32_t>(head.size() - kPrefix);
    std::memcpy(&head[kPrefix - sizeof rest], &rest, sizeof rest);
    try {
      for (const auto& spec : buffer_specs(head)) ASSERT_GE(spec.size_bytes, 0);
      unpack(head, frame.buffers);
    } catch (const base::FormatError&) {
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

}  // namespace
}  // namespace lamina::transport
