// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/buffer_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <list>
#include <mutex>
#include <new>

namespace lamina::transport::ucx {
namespace {

constexpr std::size_t kLarge = 256 << 10;  // smaller ones malloc reuses itself
constexpr std::size_t kMostKept = std::size_t(256) << 20;
constexpr std::align_val_t kAlignment{64};

// Also what a storage carries, so that its deleter knows the size.
struct Block {
  void* memory;
  std::size_t size;
};

// Its tensors can be resized, as any other.
struct Pool final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    void* memory = take(size);
    if (memory == nullptr) memory = ::operator new(size, kAlignment);
    return {memory, new Block{memory, size}, &give_back, at::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }

 private:
  static void give_back(void* context);

  void* take(std::size_t size) {
    std::lock_guard guard(mutex_);
    for (auto at = kept_.begin(); at != kept_.end(); ++at) {
      if (at->size != size) continue;
      void* memory = at->memory;
      kept_bytes_ -= size;
      kept_.erase(at);
      return memory;
    }
    return nullptr;
  }

  // Keeps `block` and forgets the oldest ones beyond the limit.
  void keep(Block block) {
    std::lock_guard guard(mutex_);
    kept_.push_front(block);
    kept_bytes_ += block.size;
    while (kept_bytes_ > kMostKept) {
      ::operator delete(kept_.back().memory, kAlignment);
      kept_bytes_ -= kept_.back().size;
      kept_.pop_back();
    }
  }

  std::mutex mutex_;
  std::list<Block> kept_;
  std::size_t kept_bytes_ = 0;
};

// Never destroyed: tensors may outlive everything else.
Pool& pool() {
  static Pool& the = *new Pool;
  return the;
}

void Pool::give_back(void* context) {
  const auto* block = static_cast<Block*>(context);
  pool().keep(*block);
  delete block;
}

}  // namespace

at::Tensor receive_buffer(std::int64_t size_bytes) {
  if (size_bytes < static_cast<std::int64_t>(kLarge)) return at::empty({size_bytes}, at::kByte);
  return at::detail::empty_generic({size_bytes}, &pool(), c10::DispatchKeySet(c10::DispatchKey::CPU), at::kByte,
                                   std::nullopt);
}

}  // namespace lamina::transport::ucx
