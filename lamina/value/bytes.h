// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "lamina/base/error.h"

// Numbers and texts as little-endian bytes.
namespace lamina::value {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie in memory");

class Writer {
 public:
  Writer() = default;
  // Makes room for about so many bytes at once.
  explicit Writer(std::size_t size_bytes) { bytes_.reserve(size_bytes); }

  template <class T>
    requires std::is_trivially_copyable_v<T>
  void put(const T& number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(T));
  }
  void put_block(std::string_view block) {
    put<std::uint64_t>(block.size());
    bytes_.append(block);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads what a Writer wrote; every read is checked, so any bytes are safe. Throws base::FormatError past the end.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <class T>
    requires std::is_trivially_copyable_v<T>
  T get() {
    T number;
    std::memcpy(&number, take(sizeof(T)).data(), sizeof(T));
    return number;
  }
  std::string_view get_block() { return take(get<std::uint64_t>()); }
  // A count of things that take at least one byte each: never more than the bytes that are left.
  std::size_t get_count() {
    const auto count = get<std::uint64_t>();
    if (count > rest_.size()) throw base::FormatError("a count exceeds the bytes that are left");
    return count;
  }
  void expect_end() const {
    if (!rest_.empty()) throw base::FormatError("bytes are left over");
  }

 private:
  std::string_view take(std::uint64_t size) {
    if (size > rest_.size()) throw base::FormatError("the bytes end early");
    const auto head = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return head;
  }

  std::string_view rest_;
};

}  // namespace lamina::value
