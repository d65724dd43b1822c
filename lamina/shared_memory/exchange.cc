// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/exchange.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ranges>
#include <thread>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"

namespace lamina::shared_memory {
namespace {

using base::str;

constexpr std::size_t kOperationsAtOnce = 2;  // that members may be in, one behind the other
constexpr std::size_t kChunksAtOnce = 2;      // of each
constexpr std::size_t kReasonsAtOnce = 4;     // that a member keeps for operations which it has given up
constexpr std::size_t kStagings = kOperationsAtOnce * kChunksAtOnce;
// Looks at a word before sleeping: as long as a wake-up takes; where others need the processor, which they are given.
constexpr int kSpins = 2000, kYields = 20;
constexpr timespec kSlice{0, 50'000'000};
constexpr auto kUnexplained = std::chrono::seconds(2);
constexpr auto kPause = std::chrono::milliseconds(5);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while the word holds `seen`; false after a slice, and when a signal comes. The word is shared between
// processes.
bool sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t seen) {
  return ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &kSlice, nullptr, 0) == 0 || errno == EAGAIN;
}

void wake_all(const std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

template <std::size_t N>
void write(std::array<char, N>& text, const std::string& what) {
  const auto count = std::min(what.size(), N - 1);
  std::memcpy(text.data(), what.data(), count);
  text[count] = '\0';
}

}  // namespace

// The beginning of a member's segment, which it alone writes but for `sleepers`. Zero is a valid beginning.
struct Exchange::Control {
  static constexpr std::size_t kLine = 64;  // bytes that a processor's cache keeps together

  // Positions below this one are staged; read; ...
  alignas(kLine) std::atomic<std::uint64_t> posted;
  alignas(kLine) std::atomic<std::uint64_t> taken;
  // ... and how often they have changed, which others sleep on, and how many do.
  alignas(kLine) std::atomic<std::uint32_t> changes;
  alignas(kLine) std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> closed;  // by a destructor; 0 where the process just ended

  // By an operation's number.
  struct Entry {
    std::uint64_t digest;
    std::array<char, 248> what;
  };
  alignas(kLine) std::array<Entry, kOperationsAtOnce> entries;

  // Operations that this member has given up, with numbers from `from` to before `to`, for one reason.
  struct GivenUp {
    std::atomic<std::uint64_t> from, to;
    std::array<char, 240> why;
  };
  alignas(kLine) std::atomic<std::uint64_t> given_up_to;  // the end of the last of them
  std::array<GivenUp, kReasonsAtOnce> given_up;

  Entry& entry(std::uint64_t operation) { return entries[operation % entries.size()]; }

  // The entry of which an operation is one; nullptr for none.
  const GivenUp* given_up_with(std::uint64_t operation) const {
    if (given_up_to.load(std::memory_order_acquire) <= operation) return nullptr;
    const auto with = [&](const GivenUp& one) {
      return operation < one.to.load(std::memory_order_acquire) && one.from.load() <= operation;
    };
    const auto* found = std::ranges::find_if(given_up, with);
    return found == given_up.end() ? nullptr : found;
  }
};

namespace {
constexpr std::size_t kControlBytes = 4096;
}

std::size_t Exchange::area_bytes(std::size_t chunk_bytes) { return kControlBytes + kStagings * chunk_bytes; }

Exchange::Exchange(const Neighbours& neighbours, std::vector<int> members, std::vector<std::byte*> areas,
                   std::size_t chunk_bytes)
    : neighbours_(neighbours),
      members_(std::move(members)),
      areas_(std::move(areas)),
      chunk_bytes_(chunk_bytes),
      crowded_(neighbours.size() > static_cast<int>(std::thread::hardware_concurrency())) {
  static_assert(sizeof(Control) <= kControlBytes && std::atomic<std::uint64_t>::is_always_lock_free);
  rank_ = static_cast<int>(std::ranges::find(members_, neighbours.rank()) - members_.begin());
}

Exchange::~Exchange() {
  if (!process_.forked()) control(rank()).closed.store(1);
}

Exchange::Control& Exchange::control(int member) const {
  return *reinterpret_cast<Control*>(areas_[member]);  // zeros, which a Control may begin with
}

std::byte* Exchange::staging(int member) const {
  const auto slot = operation_ % kOperationsAtOnce * kChunksAtOnce + chunk_ % kChunksAtOnce;
  return areas_[member] + kControlBytes + slot * chunk_bytes_;
}

const std::string& Exchange::name(int member) const { return neighbours_.name(members_[member]); }

void Exchange::run(const Operation& operation, const Check& check, const std::function<void()>& work) {
  if (process_.forked()) {
    throw base::UsageError(
        str(operation.what, " in a child of fork(): the group is its parent's; make one of its own"));
  }
  if (!broken_.empty()) throw base::PeerError(broken_);
  const auto purpose = std::exchange(purpose_, {});
  const Operation with_purpose{str(operation.what, ", ", purpose), base::hash64(purpose, operation.digest)};
  current_ = purpose.empty() ? &operation : &with_purpose;
  check_ = &check;
  differs_ = false;
  given_up_.clear();
  try {
    begin();
    work();
  } catch (const std::exception& error) {
    if (!differs_) give_up(error.what());  // all see that it differs
    finish();
    throw;
  } catch (...) {  // an interrupt of Python's
    give_up("it was interrupted");
    finish();
    throw;
  }
  finish();
}

// Its staging memory and its entry were those of the operation before the last.
void Exchange::begin() {
  phase_ = chunk_ = before_ = 0;
  if (operation_ >= kOperationsAtOnce) await(&Control::taken, position(operation_ - kOperationsAtOnce + 1, 0));
  auto& entry = control(rank()).entry(operation_);
  entry.digest = current_->digest;
  write(entry.what, current_->what);
}

void Exchange::meet() {
  publish(&Control::posted, position(operation_, ++phase_));
  await(&Control::posted, position(operation_, phase_));
  if (phase_ == 1) compare();
}

void Exchange::next_chunk() {
  publish(&Control::taken, position(operation_, phase_));
  if (chunk_++ > 0) await(&Control::taken, position(operation_, before_));
  before_ = phase_;
}

void Exchange::finish() { publish(&Control::taken, position(++operation_, 0)); }

bool Exchange::awaited() const {
  for (int member = 0; member < size(); ++member) {
    if (member == rank_) continue;
    const auto& other = control(member);
    if (other.posted.load(std::memory_order_acquire) >= position(operation_, 1)) continue;
    if (other.given_up_to.load() <= operation_) return false;
  }
  return true;
}

void Exchange::leave_out(const std::string& what, const std::string& why) {
  const Operation operation{what, 0};
  current_ = &operation;
  given_up_.clear();
  give_up(why);
  finish();
}

void Exchange::skip_to(std::uint64_t operation) {
  if (operation <= operation_) return;
  operation_ = operation;
  publish(&Control::taken, position(operation_, 0));
}

void Exchange::compare() {
  for (int member = 0; member < size(); ++member) {
    const auto& entry = control(member).entry(operation_);
    if (entry.digest == current_->digest) continue;
    refuse(str(name(rank_), " began ", current_->what, ", ", name(member), " ", entry.what.data(),
               ": all members make the same calls, in the same order"));
  }
}

void Exchange::refuse(const std::string& why) {
  differs_ = true;
  throw base::DesyncError(why);
}

// A process that ends loses its memory before its sockets.
void Exchange::explain(int member, const std::string& why) {
  const auto deadline = base::Deadline::after(kUnexplained);
  while (!deadline.expired()) {
    require_nobody_gave_up();
    require_nobody_lost(&Control::posted, position(operation_ + 1, 0));
    (*check_)(name(member));
    std::this_thread::sleep_for(kPause);
  }
  throw base::Error(str(current_->what, ", ", name(member), ": ", why));
}

// The first cause goes from member to member as it is. Where all places for a reason are taken, none of these
// operations has ended well since, for then all members had passed the ones before. So they are one behind the other,
// and this one is added to the last. (But for operations that were skipped, which nobody looks at again.)
void Exchange::give_up(const std::string& why) {
  auto& own = control(rank_);
  const auto end = [](const Control::GivenUp& one) { return one.to.load(); };
  auto& first = *std::ranges::min_element(own.given_up, {}, end);
  auto& last = *std::ranges::max_element(own.given_up, {}, end);
  if (end(last) == operation_ && end(first) > passed_by_all()) {
    last.to.store(operation_ + 1, std::memory_order_release);
  } else {
    first.to.store(0);
    write(first.why, given_up_.empty() ? str(name(rank_), " gave up ", current_->what, ": ", why) : given_up_);
    first.from.store(operation_);
    first.to.store(operation_ + 1, std::memory_order_release);
  }
  own.given_up_to.store(operation_ + 1, std::memory_order_release);
}

// The number of the first operation that some other member has not ended.
std::uint64_t Exchange::passed_by_all() const {
  auto passed = operation_;
  for (int member = 0; member < size(); ++member) {
    if (member != rank_) passed = std::min(passed, control(member).taken.load(std::memory_order_acquire) >> kPhaseBits);
  }
  return passed;
}

void Exchange::publish(Word word, std::uint64_t position) {
  auto& own = control(rank());
  (own.*word).store(position, std::memory_order_release);
  own.changes.fetch_add(1);
  if (own.sleepers.load() > 0) wake_all(own.changes);
}

void Exchange::await(Word word, std::uint64_t position) {
  for (int member = 0; member < size(); ++member) {
    if (member != rank()) await(member, word, position);
  }
  if (word == &Control::posted) require_nobody_gave_up();
}

void Exchange::await(int member, Word word, std::uint64_t position) {
  auto& other = control(member);
  const auto reached = [&] { return (other.*word).load(std::memory_order_acquire) >= position; };
  for (int look = 0; look < (crowded_ ? kYields : kSpins); ++look) {
    if (reached()) return;
    crowded_ ? std::this_thread::yield() : relax();
  }
  while (true) {
    const auto seen = other.changes.load();
    if (reached()) return;
    require_nobody_gave_up();
    other.sleepers.fetch_add(1);
    const bool changed = sleep_while(other.changes, seen);
    other.sleepers.fetch_sub(1);
    if (changed || reached()) continue;
    require_nobody_lost(word, position);
    (*check_)(name(member));
  }
}

void Exchange::require_nobody_gave_up() {
  for (int member = 0; member < size(); ++member) {
    const auto* given_up = member == rank_ ? nullptr : control(member).given_up_with(operation_);
    if (given_up == nullptr) continue;
    require_nobody_lost(&Control::posted, position(operation_, phase_));  // then that is why
    given_up_ = given_up->why.data();
    throw base::CancelledError(given_up_);
  }
}

// A member that has done its part may end. Where one has closed the group instead, that may be for another, whose
// process has ended: then this one is named.
void Exchange::require_nobody_lost(Word word, std::uint64_t position) {
  const auto all = std::views::iota(0, size());
  const auto has_closed = [&](int member) { return control(member).closed.load() != 0; };
  const auto lacks_part = [&](int member) {
    return neighbours_.lost(members_[member]) && (control(member).*word).load(std::memory_order_acquire) < position;
  };
  const auto awaited = std::ranges::find_if(all, lacks_part);
  if (awaited == all.end()) return;
  const auto has_ended = [&](int member) { return neighbours_.lost(members_[member]) && !has_closed(member); };
  const auto ended = has_closed(*awaited) ? std::ranges::find_if(all, has_ended) : awaited;
  const char* how = ended == all.end() ? " has closed the group" : " is lost: its process ended";
  broken_ = str(name(ended == all.end() ? *awaited : *ended), how, "; awaited in ", current_->what);
  throw base::PeerError(broken_);
}

}  // namespace lamina::shared_memory
