// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/large_blocks.h"
#include "lamina/device/capabilities.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>
#include <unordered_map>

namespace lamina::value {
namespace {

constexpr std::size_t kLarge = std::size_t{1} << 20;
constexpr std::size_t kPage = std::size_t{4} << 10, kLargePage = std::size_t{2} << 20;
constexpr std::size_t kMostKept = std::size_t{256} << 20, kMostKeptOfTorchs = std::size_t{16} << 20;

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Pages of the system, nullptr where it has none. They begin where a large page can.
void* map(std::size_t bytes) {
  const std::size_t all = bytes + kLargePage;
  void* begin = ::mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const auto aligned = rounded_up(first, kLargePage);
  if (aligned > first) ::munmap(begin, aligned - first);
  if (const auto end = aligned + bytes; end < first + all) ::munmap(reinterpret_cast<void*>(end), first + all - end);
  void* memory = reinterpret_cast<void*>(aligned);
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // without large pages it works as well
  return memory;
}

class LargeBlocks final : public c10::Allocator {
 public:
  LargeBlocks() : small_(*c10::GetDefaultCPUAllocator()) {
    ::pthread_atfork([] { the().mutex_.lock(); }, [] { the().mutex_.unlock(); }, [] { the().mutex_.unlock(); });
  }
  static LargeBlocks& the() {
    static LargeBlocks& the = *new LargeBlocks;  // tensors may outlive everything else
    return the;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kLarge) return small_.allocate(bytes);
    const std::size_t size = rounded_up(bytes, kPage);
    void* memory = take(size);
    if (memory == nullptr) return small_.allocate(bytes);  // whose error says so
    c10::profiledCPUMemoryReporter().New(memory, size);
    return {memory, memory, &give_back, devices::kHost};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  void keep_at_most(std::size_t bytes) {
    std::lock_guard guard(mutex_);
    most_kept_ = bytes;
    forget_beyond();
  }
  std::size_t kept_bytes() {
    std::lock_guard guard(mutex_);
    return kept_bytes_;
  }

 private:
  struct Block {
    void* memory;
    std::size_t size;
  };

  void* take(std::size_t size) {
    std::lock_guard guard(mutex_);
    for (auto at = kept_.begin(); at != kept_.end(); ++at) {
      if (at->size != size) continue;
      void* memory = at->memory;
      kept_bytes_ -= size;
      kept_.erase(at);
      return memory;
    }
    void* memory = map(size);
    if (memory != nullptr) sizes_[memory] = size;
    return memory;
  }

  static void give_back(void* memory) {
    if (!the().keep(memory)) the().small_.raw_deleter()(memory);
  }

  bool keep(void* memory) {
    std::lock_guard guard(mutex_);
    const auto found = sizes_.find(memory);
    if (found == sizes_.end()) return false;
    c10::profiledCPUMemoryReporter().Delete(memory);
    kept_.push_front({memory, found->second});
    kept_bytes_ += found->second;
    forget_beyond();
    return true;
  }

  // Gives the system those back that have lain here longest.
  void forget_beyond() {
    while (kept_bytes_ > most_kept_) {
      const auto [memory, size] = kept_.back();
      ::munmap(memory, size);
      sizes_.erase(memory);
      kept_bytes_ -= size;
      kept_.pop_back();
    }
  }

  c10::Allocator& small_;
  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;  // of all blocks, in use or kept
  std::list<Block> kept_;                         // the latest first
  std::size_t kept_bytes_ = 0, most_kept_ = kMostKept;
};

}  // namespace

c10::Allocator& large_blocks() { return LargeBlocks::the(); }

at::Tensor large_block(std::int64_t size) {
  return at::detail::empty_generic({size}, &large_blocks(), c10::DispatchKeySet(c10::DispatchKey::CPU), at::kByte,
                                   std::nullopt);
}

void take_memory_from_large_blocks() {
  c10::SetCPUAllocator(&large_blocks());
  LargeBlocks::the().keep_at_most(kMostKeptOfTorchs);
}

std::size_t kept_bytes() { return LargeBlocks::the().kept_bytes(); }

}  // namespace lamina::value
