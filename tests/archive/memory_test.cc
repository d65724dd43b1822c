// SPDX-License-Identifier: Apache-2.0
// Hostile files that are small, and would be large once they are read: the memory that the parsers take of the heap.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "lamina/archive/checksums.h"
#include "lamina/archive/manifest.h"
#include "lamina/archive/safetensors.h"
#include "lamina/base/error.h"

namespace {

std::atomic<std::int64_t> taken{0}, most{0};

void count(std::int64_t bytes) {
  const auto now = taken += bytes;
  auto before = most.load();
  while (before < now && !most.compare_exchange_weak(before, now)) {
  }
}

}  // namespace

void* operator new(std::size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  count(static_cast<std::int64_t>(::malloc_usable_size(memory)));
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) count(-static_cast<std::int64_t>(::malloc_usable_size(memory)));
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

namespace lamina::archive::testing {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

// The most bytes of the heap that a call takes beside what is taken before it.
template <class Call>
std::int64_t memory_of(const Call& call) {
  const auto before = taken.load();
  most = before;
  try {
    call();
  } catch (const base::FormatError&) {
  }
  return most - before;
}

// As many copies of a text, with commas between them, as make so many bytes.
std::string many(const std::string& part, std::size_t bytes) {
  std::string text = part;
  text.reserve(bytes + part.size() + 1);
  while (text.size() < bytes) text += "," + part;
  return text;
}

class TextInput : public FileSystem::Input {
 public:
  explicit TextInput(const std::string& text) : text_(text) {}
  std::uint64_t size() const override { return text_.size(); }
  void read(std::uint64_t offset, std::span<std::byte> to) const override {
    if (offset > size() || to.size() > size() - offset) throw base::FormatError("ends too early");
    std::memcpy(to.data(), text_.data() + offset, to.size());
  }

 private:
  const std::string& text_;
};

void expect_header_is_bounded(const std::string& json) {
  const std::uint64_t size = json.size();
  const std::string text = std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + json;
  const TextInput file(text);
  const auto memory = memory_of([&] { read_header(file, "f"); });
  EXPECT_LT(memory, 2 * std::ssize(text) + 17 * kMiB) << json.substr(0, 80);
}

constexpr std::size_t kHeader = 24 * kMiB;

TEST(MemoryOfAHeader, IsBoundedWhateverItHas) {
  expect_header_is_bounded("{" + many(R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})", kHeader) + "}");
  expect_header_is_bounded("{" + many(R"("a":{"dtype":"U8","shape":[0],"data\u005foffsets":[0,0]})", kHeader) + "}");
  expect_header_is_bounded("{\"a\":{\"shape\":[" + many("0", kHeader) + "]}}");
  expect_header_is_bounded("{\"__metadata__\":{" + many(R"("a":"")", kHeader) + "}}");
  std::string distinct;
  for (int i = 0; distinct.size() < kHeader; ++i) distinct += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"\"";
  expect_header_is_bounded("{\"__metadata__\":{" + distinct + "}}");
  expect_header_is_bounded("{\"" + std::string(kHeader, 'a') +
                           "\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,0]}}");
  expect_header_is_bounded("{\"a\":" + std::string(kHeader, '['));
  expect_header_is_bounded(std::string(kHeader, '{'));
  expect_header_is_bounded("{\"a\":{\"data_offsets\":" + std::string(kHeader, '"'));
}

void expect_manifest_is_bounded(const std::string& body) {
  const std::string rest = R"("format": "lamina checkpoint", "version": 1, "id": "1", "number": 1, )" + body;
  const auto text = "{\"checksum\": \"" + to_hex({{checksum(std::as_bytes(std::span(rest)))}}) + "\",\n" + rest + "\n";
  const auto memory = memory_of([&] { read_manifest(text); });
  EXPECT_LT(memory, 2 * std::ssize(text) + 192 * kMiB) << body.substr(0, 80);
}

constexpr std::size_t kManifest = 40 * kMiB;

TEST(MemoryOfAManifest, IsBoundedWhateverItHas) {
  const auto tensors = [](const std::string& tensor) {
    return R"("about": {}, "files": [], "tensors": [)" + many(tensor, kManifest) + "]}";
  };
  expect_manifest_is_bounded(tensors(R"({"name":"","kind":"buffer","dtype":"int8","shape":[0],"pieces":[]})"));
  expect_manifest_is_bounded(tensors("1"));
  expect_manifest_is_bounded(tensors("{}"));
  expect_manifest_is_bounded(tensors(R"("kind":0)"));
  const std::string begin = R"("about": {}, "files": [], "tensors": [{"name":"a","kind":"buffer","dtype":"int8",)";
  expect_manifest_is_bounded(begin + R"("shape":[0],"pieces":[)" + many(R"({"file":0,"begin":0})", kManifest) + "]}]}");
  expect_manifest_is_bounded(begin + R"("pieces":[],"shape":[)" + many("0", kManifest) + "]}]}");
  expect_manifest_is_bounded(begin + R"("pieces":[],"shape":[0],"also":[)" + many("\"\"", kManifest) + "]}]}");
  expect_manifest_is_bounded(begin + R"("pieces":)" + std::string(kManifest, '['));
  expect_manifest_is_bounded(R"("about": {}, "tensors": [], "files": [)" +
                             many(R"({"name":"a","bytes":0,"checksums":""})", kManifest) + "]}");
  expect_manifest_is_bounded(R"("about": {"a":[)" + many("0", kManifest) + "]}}");
  expect_manifest_is_bounded(R"("about": {"a":[)" + many("[]", kManifest) + "]}}");
  std::string keys;
  for (int i = 0; keys.size() < kManifest; ++i) keys += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":0";
  expect_manifest_is_bounded("\"about\": {" + keys + "}}");
}

}  // namespace
}  // namespace lamina::archive::testing
