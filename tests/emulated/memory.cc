// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>
#include <tuple>
#include <vector>

#include "tests/emulated/settings.h"
#include "tests/emulated/stream.h"

namespace emulated {
namespace {

using Stats = c10::CachingDeviceAllocator::DeviceStats;

constexpr std::size_t kRounding = 512;

struct Block {
  char* at;
  std::size_t size, requested;
  c10::Stream stream;
  std::set<c10::StreamId> used_on;  // besides its own
  bool is_resident;                 // has pages, which count as reserved
};

std::string in_units(std::size_t bytes) {
  std::ostringstream text;
  const bool large = bytes >= std::size_t(1) << 30;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / (large ? 1 << 30 : 1 << 20)
       << (large ? " GiB" : " MiB");
  return text.str();
}

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    const auto stream = current_stream(-1);
    const auto device = stream.device();
    check(device.index());
    if (size == 0) {
      return {nullptr, device};
    }
    touch(device.index());
    const auto rounded = (size + kRounding - 1) / kRounding * kRounding;
    std::unique_lock lock(mutex_);
    make_room(lock, stream, rounded);
    auto* block = take(stream, rounded);
    block->requested = size;
    auto& stats = stats_[device.index()];
    stats.allocated_bytes[0].increase(rounded);
    stats.active_bytes[0].increase(rounded);
    stats.requested_bytes[0].increase(size);
    stats.allocation[0].increase(1);
    return {block->at, block, &give_back, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, std::size_t size) const override {
    enqueue(current_stream(-1), [=] { std::memcpy(twin(to), twin(from), size); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(mutex_);
    for (int device = 0; device < settings().devices; ++device) {
      sweep(device);
      release(device);
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() == nullptr || settings().ignores_record_stream) {
      return;
    }
    if (data.get_deleter() != &give_back) {  // a part of another block, as from_blob makes one: CUDA's skips it, too
      return;
    }
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard lock(mutex_);
    if (block->stream != stream) {
      block->used_on.insert(stream.id());
    }
  }

  Stats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return stats_.at(device_or_current(device));
  }

  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return {settings().memory - reserved(device_or_current(device)), settings().memory};
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

 private:
  struct Pending {
    Block* block;
    std::vector<std::shared_ptr<Event>> events;
  };
  using Key = std::tuple<int, c10::StreamId, std::size_t>;

  static Key key(const c10::Stream& stream, std::size_t size) { return {stream.device_index(), stream.id(), size}; }

  static void give_back(void* context);

  std::size_t reserved(int device) const { return stats_[device].reserved_bytes[0].current; }

  bool fits(const c10::Stream& stream, std::size_t size) const {
    const auto found = free_.find(key(stream, size));
    if (found != free_.end() && !found->second.empty() && found->second.back()->is_resident) {
      return true;
    }
    return reserved(stream.device_index()) + size <= settings().memory;
  }

  // Gives cached blocks back, then waits for those that other streams still have, before it says that there is no room.
  void make_room(std::unique_lock<std::mutex>& lock, const c10::Stream& stream, std::size_t size) {
    const int device = stream.device_index();
    sweep(device);
    if (!fits(stream, size)) {
      release(device);
    }
    while (!fits(stream, size) && !pending_[device].empty()) {
      const auto event = pending_[device].front().events.front();
      lock.unlock();
      count_wait();
      event->wait();
      lock.lock();
      sweep(device);
      release(device);
    }
    if (!fits(stream, size)) {
      ++stats_[device].num_ooms;
      const auto had = reserved(device);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "emulated out of memory. Tried to allocate ", in_units(size),
                       ". Device ", device, " has a total capacity of ", in_units(settings().memory), " of which ",
                       in_units(settings().memory - had), " is free. Of the allocated memory ", in_units(had),
                       " is allocated by PyTorch.");
    }
  }

  Block* take(const c10::Stream& stream, std::size_t size) {
    auto& cached = free_[key(stream, size)];
    Block* block = nullptr;
    if (cached.empty()) {
      TORCH_CHECK(next_ + size + kPage < kSpace, "emulated: no addresses left");
      block = new Block{device_range() + next_, size, 0, stream, {}, false};
      next_ += (size + kPage) / kPage * kPage;
    } else {
      block = cached.back();
      cached.pop_back();
    }
    if (!block->is_resident) {
      block->is_resident = true;
      stats_[stream.device_index()].reserved_bytes[0].increase(size);
      fill(*block);
    }
    return block;
  }

  void free(Block* block) {
    std::lock_guard lock(mutex_);
    auto& stats = stats_[block->stream.device_index()];
    stats.allocated_bytes[0].decrease(block->size);
    stats.requested_bytes[0].decrease(block->requested);
    stats.allocation[0].decrease(1);
    if (block->used_on.empty()) {
      return put(block);
    }
    Pending pending{block, {}};
    for (const auto id : block->used_on) {
      pending.events.push_back(Event::make());
      Event::record(pending.events.back(), stream_of(block->stream.device_index(), id));
    }
    pending_[block->stream.device_index()].push_back(std::move(pending));
  }

  static void fill(const Block& block) {
    enqueue(block.stream, [at = block.at, size = block.size] { std::memset(twin(at), 0xff, size); });
  }

  void put(Block* block) {
    stats_[block->stream.device_index()].active_bytes[0].decrease(block->size);
    block->used_on.clear();
    fill(*block);
    free_[key(block->stream, block->size)].push_back(block);
  }

  // Takes blocks whose other streams have passed.
  void sweep(int device) {
    std::erase_if(pending_[device], [this](const Pending& pending) {
      for (const auto& event : pending.events) {
        if (!event->query()) {
          return false;
        }
      }
      put(pending.block);
      return true;
    });
  }

  // Gives the pages of what is cached back to the system; the addresses are kept.
  void release(int device) {
    for (auto& [key, blocks] : free_) {
      for (auto* block : blocks) {
        if (std::get<0>(key) == device && block->is_resident) {
          block->is_resident = false;
          stats_[device].reserved_bytes[0].decrease(block->size);
          enqueue(block->stream, [at = block->at, size = block->size] { ::madvise(twin(at), size, MADV_DONTNEED); });
        }
      }
    }
  }

  template <typename Change>
  void each_stat(c10::DeviceIndex device, Change change) {
    std::lock_guard lock(mutex_);
    auto& stats = stats_.at(device_or_current(device));
    for (auto* stat : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes,
                       &stats.allocation}) {
      change((*stat)[0]);
    }
  }

  std::mutex mutex_;  // before those of streams and events
  std::map<Key, std::vector<Block*>> free_;
  std::array<std::vector<Pending>, kMostDevices> pending_;
  std::array<Stats, kMostDevices> stats_;
  std::size_t next_ = kPage;
};

Memory& memory() {
  static auto& made = *new Memory;
  return made;
}

void Memory::give_back(void* context) {
  if (!is_forked()) {
    memory().free(static_cast<Block*>(context));
  }
}

[[maybe_unused]] const bool memory_registered = (c10::SetAllocator(kType, &memory()), true);

}  // namespace

c10::DeviceAllocator& device_memory() { return memory(); }

std::pair<std::size_t, std::size_t> allocated_bytes(int device) {
  const auto stat = memory().getDeviceStats(static_cast<c10::DeviceIndex>(device)).allocated_bytes[0];
  return {stat.current, stat.peak};
}

void reset_peak_bytes(int device) { memory().resetPeakStats(static_cast<c10::DeviceIndex>(device)); }

}  // namespace emulated
