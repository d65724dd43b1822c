// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/zip_file.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/foreign/crc32.h"

namespace lamina::foreign {

using archive::FileSystem;

namespace {

constexpr std::uint64_t kMost32 = 0xffffffff, kMost16 = 0xffff;
constexpr std::uint64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56, kEntryBytes = 46, kLocalBytes = 30;
constexpr std::uint64_t kMostDirectoryBytes = std::uint64_t{256} << 20;

[[noreturn]] void refuse_zip(const char* what) {
  throw base::FormatError(base::str("it is no zip archive of torch's: ", what));
}

// Reads numbers of bytes that were read before; nothing beyond them.
class Bytes {
 public:
  Bytes(const FileSystem::Input& file, Extent within, std::uint64_t begin, std::uint64_t size) {
    if (begin > within.size || size > within.size - begin) refuse_zip("a place beyond its end");
    bytes_.resize(size);
    file.read(within.begin + begin, bytes_);
  }

  std::uint64_t size() const { return bytes_.size(); }
  template <class T>
  T at(std::uint64_t offset) const {
    if (offset > bytes_.size() || sizeof(T) > bytes_.size() - offset) refuse_zip("it ends too early");
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof(T));
    return value;
  }
  std::string text(std::uint64_t offset, std::uint64_t size) const {
    if (offset > bytes_.size() || size > bytes_.size() - offset) refuse_zip("it ends too early");
    return {reinterpret_cast<const char*>(bytes_.data()) + offset, size};
  }

 private:
  std::vector<std::byte> bytes_;
};

struct Directory {
  std::uint64_t begin = 0, size = 0, entries = 0;
};

Directory find_directory(const FileSystem::Input& file, Extent within) {
  const auto size = std::min(within.size, kEndBytes + kMost16);
  const Bytes tail(file, within, within.size - size, size);
  for (std::uint64_t left = size >= kEndBytes ? size - kEndBytes + 1 : 0; left > 0; --left) {
    const auto at = left - 1;
    if (tail.at<std::uint32_t>(at) != 0x06054b50) continue;
    Directory directory{tail.at<std::uint32_t>(at + 16), tail.at<std::uint32_t>(at + 12),
                        tail.at<std::uint16_t>(at + 10)};
    const bool large = directory.begin == kMost32 || directory.size == kMost32 || directory.entries == kMost16;
    if (!large) return directory;
    if (at < kLocatorBytes || tail.at<std::uint32_t>(at - kLocatorBytes) != 0x07064b50) return directory;
    const Bytes end(file, within, tail.at<std::uint64_t>(at - kLocatorBytes + 8), kEnd64Bytes);
    if (end.at<std::uint32_t>(0) != 0x06064b50) refuse_zip("it has no end of 64 bits");
    return {end.at<std::uint64_t>(48), end.at<std::uint64_t>(40), end.at<std::uint64_t>(32)};
  }
  refuse_zip("it has no directory; torch before 1.6 wrote other files, which a newer one has to save again");
}

// Takes a number that did not fit into 32 bits from the extra field.
class Extra {
 public:
  Extra(const Bytes& bytes, std::uint64_t begin, std::uint64_t size) : bytes_(bytes) {
    for (auto at = begin; at + 4 <= begin + size;) {
      const std::uint64_t own = bytes.at<std::uint16_t>(at + 2);
      if (bytes.at<std::uint16_t>(at) == 1) {
        at_ = at + 4;
        end_ = std::min(at_ + own, begin + size);
        return;
      }
      at += 4 + own;
    }
  }
  std::uint64_t number(std::uint64_t short_one) {
    if (short_one != kMost32) return short_one;
    if (at_ + sizeof(std::uint64_t) > end_) refuse_zip("a size without its 64 bits");
    at_ += sizeof(std::uint64_t);
    return bytes_.at<std::uint64_t>(at_ - sizeof(std::uint64_t));
  }

 private:
  const Bytes& bytes_;
  std::uint64_t at_ = 0, end_ = 0;
};

}  // namespace

std::map<std::string, ZipMember> read_zip(const FileSystem::Input& file, Extent within) {
  if (within.begin > file.size() || within.size > file.size() - within.begin)
    refuse_zip("a place beyond the file's end");
  const auto directory = find_directory(file, within);
  if (directory.size > kMostDirectoryBytes) refuse_zip("a directory of more than 256 MiB");
  const Bytes bytes(file, within, directory.begin, directory.size);
  std::map<std::string, ZipMember> files;
  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    if (bytes.at<std::uint32_t>(at) != 0x02014b50) refuse_zip("an entry that is none");
    const auto method = bytes.at<std::uint16_t>(at + 10);
    const std::uint64_t name_size = bytes.at<std::uint16_t>(at + 28), extra_size = bytes.at<std::uint16_t>(at + 30);
    const std::uint64_t comment_size = bytes.at<std::uint16_t>(at + 32);
    Extra extra(bytes, at + kEntryBytes + name_size, extra_size);
    const auto size = extra.number(bytes.at<std::uint32_t>(at + 24));
    const auto packed = extra.number(bytes.at<std::uint32_t>(at + 20));
    const auto begin = extra.number(bytes.at<std::uint32_t>(at + 42));
    if (method != 0 || packed != size) refuse_zip("it is compressed");
    const Bytes local(file, within, begin, kLocalBytes);
    if (local.at<std::uint32_t>(0) != 0x04034b50) refuse_zip("a file without a header");
    const auto data = begin + kLocalBytes + local.at<std::uint16_t>(26) + local.at<std::uint16_t>(28);
    if (data > within.size || size > within.size - data) refuse_zip("a file beyond its end");
    const auto name = bytes.text(at + kEntryBytes, name_size);
    const ZipMember member{{within.begin + data, size}, bytes.at<std::uint32_t>(at + 16)};
    if (!files.try_emplace(name, member).second) refuse_zip("two files of one name");
    at += kEntryBytes + name_size + extra_size + comment_size;
  }
  return files;
}

bool is_undamaged(const FileSystem::Input& file, const ZipMember& member) {
  constexpr std::uint64_t kPart = std::uint64_t{1} << 20;
  Crc32 crc;
  std::vector<std::byte> part;
  for (std::uint64_t at = 0; at < member.size; at += part.size()) {
    part.resize(std::min(kPart, member.size - at));
    file.read(member.begin + at, part);
    crc.add(part);
  }
  return crc.value() == member.crc;
}

}  // namespace lamina::foreign
