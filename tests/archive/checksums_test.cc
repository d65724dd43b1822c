// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/checksums.h"

#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include "lamina/base/error.h"
#include "tests/archive/simulated_files.h"
#include "tests/message_of.h"

namespace lamina::archive::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::byte> some_bytes(std::uint64_t size) {
  std::vector<std::byte> bytes(size);
  for (std::uint64_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 2654435761U >> 7);
  return bytes;
}

RC_GTEST_PROP(Hex, HasWhatWasWritten, (const std::vector<Checksum>& checksums)) {
  RC_ASSERT(from_hex(to_hex(checksums)) == checksums);
}

TEST(Hex, RefusesOtherTexts) {
  EXPECT_EQ(to_hex({{0x0123456789abcdefULL}}), "0123456789abcdef");
  for (const auto* text : {"0", "0123456789abcde", "0123456789ABCDEF", "0123456789abcdeg", "0x23456789abcdef",
                           " 123456789abcdef", "-123456789abcdef", "0123456789abcdef0"}) {
    EXPECT_THROW(from_hex(text), base::FormatError) << text;
  }
}

// XXH3's 64-bit hash by its publication, of nothing and of 1 byte: files of today are read by those of tomorrow.
TEST(Checksum, IsXxh3) {
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2ULL);
  EXPECT_EQ(checksum(some_bytes(1)), 0xc44bdff4074eecdbULL);
}

RC_GTEST_PROP(CheckedFile, IsTheSameHoweverItIsWrittenAndRead, ()) {
  const auto size = *rc::gen::element<std::uint64_t>(0, 1, kBlock - 1, kBlock, kBlock + 1, 3 * kBlock, 3 * kBlock + 77);
  const auto bytes = some_bytes(size);
  SimulatedFiles files;
  CheckedOutput output(files.create("/f"));
  for (std::uint64_t at = 0; at < size;) {
    const auto count = std::min(size - at, *rc::gen::element<std::uint64_t>(1000, kBlock / 3, kBlock, 2 * kBlock + 5));
    output.write(std::span(bytes).subspan(at, count));
    at += count;
  }
  output.finish();
  RC_ASSERT(output.size() == size);
  std::vector<Checksum> expected;
  for (std::uint64_t at = 0; at < size; at += kBlock) {
    expected.push_back(checksum(std::span(bytes).subspan(at, std::min(kBlock, size - at))));
  }
  RC_ASSERT(output.checksums() == expected);

  CheckedInput input(files.open("/f"), "f", size, expected);
  const auto offset = *rc::gen::inRange<std::uint64_t>(0, size + 1);
  std::vector<std::byte> part(*rc::gen::inRange<std::uint64_t>(0, size - offset + 1));
  input.read(offset, part);
  RC_ASSERT(std::ranges::equal(part, std::span(bytes).subspan(offset, part.size())));
  std::uint64_t read = 0;
  RC_ASSERT(input.damaged({}, [&](auto count) { read += count; }).empty());
  RC_ASSERT(read == size);
}

TEST(CheckedFile, DamageIsFoundByWhoReadsItsBlockAndNamed) {
  auto bytes = some_bytes(3 * kBlock + 10);
  SimulatedFiles files;
  std::vector<Checksum> checksums;
  for (std::uint64_t at = 0; at < bytes.size(); at += kBlock) {
    checksums.push_back(checksum(std::span(bytes).subspan(at, std::min(kBlock, bytes.size() - at))));
  }
  bytes[kBlock + 5] ^= std::byte{1};
  bytes.back() ^= std::byte{128};
  files.create("/f")->write(bytes);
  CheckedInput input(files.open("/f"), "model-00001.safetensors", bytes.size(), checksums);
  std::vector<std::byte> part(kBlock);
  EXPECT_NO_THROW(input.read(0, part));
  EXPECT_NO_THROW(input.read(2 * kBlock + 1, std::span(part).first(100)));
  EXPECT_EQ(
      message_of<base::FormatError>([&] { input.read(1, part); }),
      "model-00001.safetensors: the 1048576 bytes at 1048576 are not those that were written: the file is damaged");
  EXPECT_THROW(input.read(3 * kBlock, std::span(part).first(1)), base::FormatError);
  EXPECT_THAT(message_of<base::FormatError>([&] { input.read(3 * kBlock, std::span(part).first(11)); }),
              HasSubstr("11 bytes at 3145728 are not in its 3145738"));
  EXPECT_THROW(input.read(~0ULL, std::span(part).first(2)), base::FormatError);
  EXPECT_THAT(input.damaged({}, [](auto) {}), ElementsAre(1, 3));
  std::vector<std::uint64_t> of_shares;
  for (std::uint64_t index = 0; index < 3; ++index) {
    const auto found = input.damaged({.index = index, .of = 3}, [](auto) {});
    of_shares.insert(of_shares.end(), found.begin(), found.end());
  }
  EXPECT_THAT(of_shares, ElementsAre(1, 3));
  EXPECT_THAT(message_of<base::FormatError>([&] { CheckedInput(files.open("/f"), "f", 5, {1}); }),
              HasSubstr("f: 3145738 bytes, where 5 were written"));
}

}  // namespace
}  // namespace lamina::archive::testing
