// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/emulated/memory.h"
#include "tests/emulated/stream.h"

namespace emulated {
namespace {

class Pinned final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    if (size == 0) {
      return {nullptr, c10::Device(c10::kCPU)};
    }
    auto* at = static_cast<char*>(std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage));
    TORCH_CHECK(at != nullptr, "emulated: the host has no ", size, " bytes to pin");
    std::lock_guard lock(mutex_);
    sweep();
    blocks_[at].size = size;
    return {at, at, &give_back, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }

  bool record_event(void* address, void*, c10::Stream stream) override {
    std::lock_guard lock(mutex_);
    const auto block = find(address);
    if (block == blocks_.end()) {
      return false;
    }
    block->second.copies.push_back(Event::make());
    Event::record(block->second.copies.back(), stream);
    return true;
  }

  bool has(const void* address) {
    std::lock_guard lock(mutex_);
    return find(address) != blocks_.end();
  }

  void empty_cache() override {
    std::lock_guard lock(mutex_);
    sweep();
  }

  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Block {
    std::size_t size = 0;
    std::vector<std::shared_ptr<Event>> copies;
    bool is_free = false;
  };
  using Blocks = std::map<const char*, Block>;

  static void give_back(void* context);

  Blocks::iterator find(const void* address) {
    const auto* at = static_cast<const char*>(address);
    const auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) {
      return blocks_.end();
    }
    const auto block = std::prev(after);
    return at < block->first + block->second.size ? block : blocks_.end();
  }

  void free(const char* at) {
    std::lock_guard lock(mutex_);
    blocks_.at(at).is_free = true;
    sweep();
  }

  // Frees what no copy needs any more. It is overwritten, as the device's memory is.
  void sweep() {
    for (auto entry = blocks_.begin(); entry != blocks_.end();) {
      auto& [address, block] = *entry;
      std::erase_if(block.copies, [](const auto& copy) { return copy->query(); });
      if (!block.is_free || !block.copies.empty()) {
        ++entry;
        continue;
      }
      auto* at = const_cast<char*>(address);
      std::memset(at, 0xff, block.size);
      std::free(at);
      entry = blocks_.erase(entry);
    }
  }

  std::mutex mutex_;  // before those of streams and events
  Blocks blocks_;
};

Pinned& pinned() {
  static auto& made = *new Pinned;
  return made;
}

void Pinned::give_back(void* context) {
  if (!is_forked()) {
    pinned().free(static_cast<const char*>(context));
  }
}

[[maybe_unused]] const bool pinned_registered = (at::setHostAllocator(kType, &pinned()), true);

}  // namespace

c10::Allocator& pinned_memory() { return pinned(); }

bool is_pinned(const void* address) { return pinned().has(address); }

void record_pinned(const void* address, const c10::Stream& stream) {
  pinned().record_event(const_cast<void*>(address), nullptr, stream);
}

}  // namespace emulated
