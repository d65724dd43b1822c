// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/staging.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/failure.h"
#include "lamina/device/streams.h"

namespace lamina::transport {
namespace {

// As much may wait to be sent: then send() waits until some has left.
constexpr std::int64_t kMostStaged = std::int64_t(256) << 20;
// How long an orderly end waits for what is still to leave.
constexpr auto kFlush = std::chrono::seconds(10);
constexpr auto kLook = std::chrono::microseconds(50);  // how often a copy under way is looked at

bool has_tensors_of_device(const Message& message) {
  bool any = false;
  value::for_each_tensor(message.body, [&any](const at::Tensor& tensor) {
    any = any || (tensor.defined() && devices::has_streams(tensor.device()));
  });
  return any;
}

// The storages of tensors that the message alone holds: nobody writes to them when it is gone.
std::unordered_set<const void*> own_storages(const Message& message) {
  std::unordered_set<const void*> own;
  value::for_each_tensor(message.body, [&own](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const auto& storage = tensor.storage();
    // Memory that is lent to a storage, which has no allocator then, would not be kept for the copy.
    const bool is_own = tensor.use_count() == 1 && storage.use_count() == 1 && storage.allocator() != nullptr;
    if (is_own) own.insert(storage.unsafeGetStorageImpl());
  });
  return own;
}

}  // namespace

StagingTransport::~StagingTransport() { close(false); }

StagingTransport::Staged StagingTransport::stage(base::Rank to, const Message& message) {
  const auto own = own_storages(message);
  Staged staged{.frame = pack(message), .step = message.call.step};
  for (auto& buffer : staged.frame.buffers) {
    if (devices::is_host(buffer)) {
      buffer = buffer.clone();  // its owner may write to it when send() has returned
      continue;
    }
    const bool is_packed = buffer.storage().use_count() == 1;  // a copy that was made for the message
    const bool is_alone = is_packed || own.contains(buffer.storage().unsafeGetStorageImpl());
    staged.bytes += buffer.numel();
    if (lender_ != nullptr && lender_->takes(to, buffer)) {
      buffer = staged.lent.emplace_back(devices::LentBytes::of(buffer, is_alone)).bytes();
    } else {
      buffer = staged.copies.emplace_back(buffer, is_alone).host();
    }
  }
  return staged;
}

bool StagingTransport::has_staged(base::Rank to) {
  const std::lock_guard lock(mutex_);
  const auto found = outboxes_.find(to);
  return found != outboxes_.end() && (found->second.sending || !found->second.staged.empty());
}

void StagingTransport::send(base::Rank to, const Message& message) {
  const bool is_staged = has_tensors_of_device(message) || has_staged(to);
  is_staged ? add(to, stage(to, message)) : ForwardingTransport::send(to, message);
}

void StagingTransport::tell(base::Rank to, const Message& message) {
  has_staged(to) ? add(to, Staged{.words = message}) : ForwardingTransport::tell(to, message);
}

void StagingTransport::add(base::Rank to, Staged staged) {
  std::unique_lock lock(mutex_);
  // Bounded by the inner send's own deadline. What has no copies waits for nobody.
  changed_.wait(lock, [&] {
    const bool fits = staged.bytes == 0 || staged_bytes_ == 0 || staged_bytes_ + staged.bytes <= kMostStaged;
    return closing_ || fits;
  });
  base::internal_check(!closing_, "a message to another rank after the transport was closed");
  staged_bytes_ += staged.bytes;
  auto& outbox = outboxes_[to];
  outbox.staged.push_back(std::move(staged));
  if (!outbox.thread.joinable()) outbox.thread = std::thread([this, to, &outbox] { send_until_closed(to, outbox); });
  changed_.notify_all();
}

void StagingTransport::send_until_closed(base::Rank to, Outbox& outbox) {
  const c10::OptionalStreamGuard on_stream(devices::default_stream());
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closing_ || !outbox.staged.empty(); });
    if (closing_) return;
    auto next = std::move(outbox.staged.front());
    outbox.staged.pop_front();
    outbox.sending = true;
    const auto bytes = next.bytes;
    lock.unlock();
    send_staged(to, std::move(next));
    lock.lock();
    outbox.sending = false;
    staged_bytes_ -= bytes;
    changed_.notify_all();
  }
}

// Looks now and then: a synchronization would hold locks of the device's driver that threads which compute want. False
// where the transport closes first: the device may be stuck.
bool StagingTransport::await_copies(const Staged& staged) {
  const auto is_ready = [&] {
    return std::ranges::all_of(staged.copies, &devices::CopyOut::passed) &&
           std::ranges::all_of(staged.lent, &devices::LentBytes::are_ready);
  };
  while (!is_ready()) {
    if (closing_) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

void StagingTransport::send_staged(base::Rank to, Staged staged) {
  try {
    if (staged.words) return ForwardingTransport::tell(to, *staged.words);
    if (!await_copies(staged)) return;
    send_packed(to, std::move(staged.frame), staged.step);
  } catch (const base::PeerError&) {       // which is told to whoever waits for that rank
  } catch (const base::CancelledError&) {  // its step has ended
  } catch (const std::exception& error) {
    if (devices::failure() != nullptr) return;  // of which all ranks hear
    base::log_warning(base::str("a message to rank ", to, " was not sent: ", error.what()));
  }
}

// Messages of earlier steps, which may have ended well, still leave, and so does what was told: why the step failed.
void StagingTransport::give_up_sends(std::optional<base::Step> step) {
  {
    const std::lock_guard lock(mutex_);
    for (auto& [to, outbox] : outboxes_) {
      std::erase_if(outbox.staged, [&](const Staged& staged) {
        const bool is_given_up = step && !staged.words && staged.step == *step;
        if (is_given_up) staged_bytes_ -= staged.bytes;
        return is_given_up;
      });
    }
  }
  changed_.notify_all();
  ForwardingTransport::give_up_sends(step);
}

void StagingTransport::close(bool orderly) {
  {
    std::unique_lock lock(mutex_);
    const auto is_busy = [](const auto& each) { return each.second.sending || !each.second.staged.empty(); };
    const auto has_left = [&] { return closing_ || std::ranges::none_of(outboxes_, is_busy); };
    if (orderly) changed_.wait_for(lock, kFlush, has_left);
    closing_ = true;
  }
  changed_.notify_all();
  ForwardingTransport::close(orderly);
  for (auto& [to, outbox] : outboxes_) {
    if (outbox.thread.joinable()) outbox.thread.join();
  }
}

}  // namespace lamina::transport
