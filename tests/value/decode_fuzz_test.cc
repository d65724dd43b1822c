// SPDX-License-Identifier: Apache-2.0
// Bytes that encode() never wrote.
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <random>

#include "lamina/base/error.h"
#include "tests/value/sent.h"

namespace {
std::atomic<std::size_t> largest_request = 0;
}  // namespace

// Every request for memory of this program, so that a test may see the largest.
void* operator new(std::size_t size) {
  if (size > largest_request) largest_request = size;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace lamina::value {
namespace {

// LAMINA_SOAK multiplies the rounds.
int rounds() { return std::getenv("LAMINA_SOAK") != nullptr ? 3000000 : 100000; }

Value sample() {
  const auto base = at::arange(24, at::kFloat).view({4, 6});
  return Dict{{{"x", List{{base, base[1], base.t(), at::Tensor(), true, 2.5}}},
               {Slice{{None{}, std::int64_t{1}, None{}}}, Tuple{{at::kHalf, at::Device(at::kCPU)}}},
               {Reference{}, Opaque{"codec", "bytes", {at::arange(3)}}}}};
}

std::string damaged(std::string bytes, std::mt19937_64& random) {
  constexpr std::int64_t kNumbers[] = {-1, 0, 1, 64, 1LL << 31, 1LL << 40, 1LL << 62, INT64_MAX, INT64_MIN};
  for (auto left = random() % 3; left < 3; ++left) {
    const auto at = random() % (bytes.size() + 1);
    switch (random() % 5) {
      case 0:
        bytes.resize(at);
        break;
      case 1:
        bytes.insert(at, 1, static_cast<char>(random()));
        break;
      case 2:
        bytes.insert(at, bytes.substr(random() % (bytes.size() + 1), random() % 32));
        break;
      case 3:
        if (at < bytes.size()) bytes[at] = static_cast<char>(random());
        break;
      default:
        if (at + 8 <= bytes.size()) std::memcpy(&bytes[at], &kNumbers[random() % std::size(kNumbers)], 8);
    }
  }
  return bytes;
}

// Decodes, and reads what came of it. Anything but a tree or a FormatError fails the test.
void expect_harmless(const std::string& meta, const std::vector<at::Tensor>& buffers) {
  largest_request = 0;
  try {
    const Value tree = decode(meta, buffers);
    for_each_tensor(tree, [](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.numel() < 10000) tensor.clone();
    });
  } catch (const base::FormatError&) {
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  ASSERT_LE(largest_request, 4096 + 100 * meta.size());
}

TEST(DecodeFuzz, DamagedBytesAreATreeOrAFormatErrorAndTakeLittleMemory) {
  std::mt19937_64 random(1);
  const Encoded whole = encode(sample());
  for (int i = 0; i < rounds() && !::testing::Test::HasFailure(); ++i) {
    expect_harmless(damaged(whole.meta, random), whole.buffers);
  }
}

TEST(DecodeFuzz, RandomBytesAreATreeOrAFormatErrorAndTakeLittleMemory) {
  std::mt19937_64 random(2);
  const Encoded whole = encode(sample());
  for (int i = 0; i < rounds() && !::testing::Test::HasFailure(); ++i) {
    std::string meta(random() % 64, '\0');
    for (auto& byte : meta) byte = static_cast<char>(random() % (random() % 2 == 0 ? 256 : 16));
    expect_harmless(meta, whole.buffers);
  }
}

TEST(DecodeFuzz, EveryTruncationAndEveryMissingBufferIsMalformed) {
  const Encoded whole = encode(sample());
  for (std::size_t size = 0; size < whole.meta.size(); ++size) {
    EXPECT_THROW(decode(whole.meta.substr(0, size), whole.buffers), base::FormatError) << size;
  }
  EXPECT_THROW(decode(whole.meta, {}), base::FormatError);
  EXPECT_THROW(decode(whole.meta, {whole.buffers[0].slice(0, 0, 90), whole.buffers[1]}), base::FormatError);
}

}  // namespace
}  // namespace lamina::value
