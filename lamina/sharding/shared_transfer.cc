// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/sharding/shared_layout.h"
#include "lamina/sharding/sums.h"
#include "lamina/sharding/transfer.h"
#include "lamina/shared_memory/reduce.h"
#include "lamina/value/dtype.h"

namespace lamina::sharding {
namespace {

using shared_memory::Segment;

constexpr auto kSumming = "summing gradients";
constexpr auto kStandstill = std::chrono::milliseconds(200);

// Looks again at what other processes write: soon at first, which often is enough, and then every half millisecond.
class Poll {
 public:
  Poll(const base::Patience& patience, std::function<std::string()> what)
      : patience_(patience), what_(std::move(what)), wait_(patience) {}

  void wait() {
    if (++looks_ < 100) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(looks_ < 300 ? 50 : 500));
    const auto now = base::Clock::now();
    if (now - checked_ < base::kInterruptSlice) return;
    checked_ = now;
    if (patience_.check_interrupt) patience_.check_interrupt();
    wait_.check(what_);
  }

 private:
  const base::Patience& patience_;
  const std::function<std::string()> what_;
  base::LongWait wait_;
  base::Clock::time_point checked_ = base::Clock::now();
  int looks_ = 0;
};

class SharedTransfer : public Transfer {
 public:
  // `arena_bytes`: as many as all gradients take together; each has a place of its own behind them.
  SharedTransfer(const std::vector<Spec>& parameters, SharedLayout layout, std::size_t arena_bytes,
                 std::size_t bytes_at_once, Segment segment, const collective::Group& group,
                 messaging::Mailbox* mailbox)
      : mailbox_(mailbox),
        segment_(std::make_shared<const Segment>(std::move(segment))),
        layout_(std::move(layout)),
        ranks_(group.members()),
        member_(group.rank()),
        members_(group.size()),
        sums_(parameters, group.size()),
        arena_(arena_bytes),
        bytes_at_once_(bytes_at_once) {
    for (const auto& each : parameters) {
      State own{.spec = each, .size_of = c10::elementSize(each.gradient_type()), .own_place = arena_bytes};
      own.shard_numel = each.shard_numel(members_);
      arena_bytes += Pieces::size(each.gradient_bytes());
      own_.push_back(std::move(own));
    }
    for (std::size_t i = 0; i < own_.size(); ++i) {
      const auto size_of = c10::elementSize(own_[i].spec.dtype);
      const auto own_begin = static_cast<std::size_t>(own_[i].shard_numel) * member_ * size_of;
      own_[i].shard = at::from_blob(
          at(layout_.value(i)) + own_begin, {own_[i].shard_numel}, [kept = segment_](void*) {},
          at::TensorOptions(own_[i].spec.dtype));
    }
  }

  at::Tensor shard(std::size_t parameter) override { return own_.at(parameter).shard; }

  std::vector<c10::DataPtr> values(std::span<const std::size_t> parameters) override {
    using Kept = std::shared_ptr<const Segment>;
    std::vector<c10::DataPtr> values;
    for (const auto parameter : parameters) {
      values.emplace_back(
          at(layout_.value(parameter)), new Kept(segment_), [](void* kept) { delete static_cast<Kept*>(kept); },
          devices::kHost);
    }
    return values;
  }

  at::Tensor copy(std::size_t parameter) override {
    const auto& spec = own_.at(parameter).spec;
    return at::from_blob(at(layout_.value(parameter)), {spec.numel}, at::TensorOptions(spec.dtype)).clone();
  }

  void give(std::size_t parameter, at::Tensor gradient, std::int64_t pass) override {
    std::unique_lock lock(mutex_);
    enter(pass);
    own_.at(parameter).kept.push_back(std::move(gradient));
    if (std::ranges::find(busy_, parameter) == busy_.end()) busy_.push_back(parameter);
    advance_busy();
    let_others_come_nearer(lock);
  }

  void reduce(std::int64_t pass, const base::Patience& patience) override {
    auto watched = patience;
    std::optional<messaging::MutualWaits::Scope> scope;  // others may wait for this rank
    if (mailbox_ != nullptr) {
      scope.emplace(
          mailbox_->waits(),
          messaging::MutualWaits::Wait{
              .what = kSumming, .lacks = [this] { return absent(); }, .call = patience.call, .only_answers = true});
      watched = scope->watched(patience);
      watched.check_interrupt = [this, check = watched.check_interrupt] {
        check();
        require_members();
      };
    }
    Poll poll(watched,
              [this] { return base::str(kSumming, " over ", base::name_ranks(ranks_), base::without(absent())); });
    while (!finished(pass)) {
      try {
        poll.wait();
      } catch (const base::PeerError&) {
        if (!finished(pass)) throw;  // a member may end once all are done
        break;
      }
    }
    const std::lock_guard lock(mutex_);
    leave();
  }

  at::Tensor take_sum(std::size_t parameter) override {
    const std::lock_guard lock(mutex_);
    return std::exchange(own_.at(parameter).sum, {});
  }

  void abandon(const value::Failure& /*failure*/) override {
    const std::lock_guard lock(mutex_);
    leave();
    for (auto& own : own_) own.sum.reset();
  }

 private:
  struct State {
    Spec spec;
    std::size_t size_of = 0;    // elements of gradients
    std::size_t own_place = 0;  // for a gradient that no gap in the arena is large enough for
    std::int64_t shard_numel = 0;
    at::Tensor shard;
    // In this pass:
    std::deque<at::Tensor> kept;       // gradients that are still to be posted
    std::optional<std::size_t> piece;  // of the arena, where the last one lies
    std::int64_t posted = 0, summed = 0;
    at::Tensor sum;
  };

  static constexpr auto kAnyBytes = std::numeric_limits<std::size_t>::max();

  std::byte* at(std::size_t offset) const { return segment_->data() + offset; }
  std::atomic<std::uint64_t>& word(std::size_t offset) const {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(at(offset));  // zeros, which it may begin with
  }
  // Memory does not tell who is lost.
  void require_members() const {
    if (const auto loss = mailbox_->loss(ranks_, {})) {
      throw base::PeerError(base::str(kSumming, ": ", loss->text()), loss, base::Code{"group-lost"});
    }
  }

  // How many of this pass.
  std::int64_t count(std::size_t offset) const {
    const auto found = Word::unpack(word(offset).load(std::memory_order_acquire));
    return found.pass == pass_ ? found.count : 0;
  }
  bool reached(std::size_t offset) const {
    return Word::unpack(word(offset).load(std::memory_order_acquire)).pass >= pass_;
  }
  template <class Says>
  bool all(const Says& says) const {
    for (int member = 0; member < members_; ++member) {
      if (!says(member)) return false;
    }
    return true;
  }

  void enter(std::int64_t pass) {
    if (pass == pass_) return;
    leave();
    pass_ = pass;
  }

  // Whatever is left of a pass.
  void leave() {
    for (auto& own : own_) {
      own.kept.clear();
      own.piece.reset();
      own.posted = own.summed = 0;
    }
    arena_.give_back_all();
    busy_.clear();
    ended_ = done_ = false;
    waits_ = true;
    pass_ = -1;
  }

  // Does what can be done for a parameter now, posting no more than so many bytes at once, but always one gradient.
  // True when nothing of this member's is left to do.
  bool advance(std::size_t parameter, std::size_t bytes_at_once) {
    auto& own = own_[parameter];
    while (true) {
      while (is_complete(parameter, own.summed + 1)) sum_next(parameter);
      if (own.piece && all([&](int other) { return count(layout_.summed(parameter, other)) >= own.posted; })) {
        arena_.give_back(*std::exchange(own.piece, {}));
      }
      if (own.piece || own.kept.empty()) break;
      if (!post(parameter, bytes_at_once)) break;
    }
    return !own.piece && own.kept.empty();
  }

  void advance_busy() {
    std::erase_if(busy_, [this](std::size_t each) { return advance(each, bytes_at_once_); });
  }

  // Waits while this member keeps too much, as long as that grows less: others that wait in turn for what this one
  // gives later end it, for this pass.
  void let_others_come_nearer(std::unique_lock<std::mutex>& lock) {
    auto least = kept_bytes();
    auto since = base::Clock::now();
    while (waits_ && kept_bytes() > kMostBytesUnderWay) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(500));
      lock.lock();
      advance_busy();
      const auto now = base::Clock::now();
      if (const auto kept = kept_bytes(); kept < least) {
        least = kept;
        since = now;
      }
      if (now - since > kStandstill) waits_ = false;
    }
  }

  std::size_t kept_bytes() const {
    std::size_t bytes = 0;
    for (const auto parameter : busy_) bytes += own_[parameter].kept.size() * own_[parameter].spec.gradient_bytes();
    return bytes;
  }

  bool post(std::size_t parameter, std::size_t bytes_at_once) {
    auto& own = own_[parameter];
    const auto bytes = own.spec.gradient_bytes();
    if (arena_.in_use() > 0 && arena_.in_use() + Pieces::size(bytes) > bytes_at_once) return false;
    own.piece = arena_.take(bytes).value_or(own.own_place);
    const auto gradient = std::move(own.kept.front());
    own.kept.pop_front();
    std::memcpy(at(layout_.arena(member_) + *own.piece), gradient.const_data_ptr(), gradient.nbytes());
    word(layout_.place(parameter, member_)).store(*own.piece, std::memory_order_relaxed);
    word(layout_.posted(parameter, member_)).store(Word{pass_, ++own.posted}.pack(), std::memory_order_release);
    return true;
  }

  // Some member has posted gradient `k`, and the others have, too, or never will in this pass.
  bool is_complete(std::size_t parameter, std::int64_t k) const {
    bool any = false;
    for (int other = 0; other < members_; ++other) {
      const bool has = count(layout_.posted(parameter, other)) >= k;
      if (!has && !(reached(layout_.ended(other)) && count(layout_.total(parameter, other)) < k)) return false;
      any = any || has;
    }
    return any;
  }
  // Every gradient that all members have in this pass, which all have ended.
  bool is_summed(std::size_t parameter) const {
    return all([&](int other) { return count(layout_.total(parameter, other)) <= own_[parameter].summed; });
  }

  void sum_next(std::size_t parameter) {
    auto& own = own_[parameter];
    const auto k = ++own.summed;
    const auto share = own.spec.share(members_, member_);
    const auto valid = share.count();
    const bool widens = own.spec.gradient_type() != own.spec.sum_type();
    std::vector<const std::byte*> sources;
    if (!own.sum.defined()) {
      own.sum = sums_.take(parameter);
      (widens ? own.sum : own.sum.narrow(0, valid, share.size - valid)).zero_();
    } else if (!widens) {
      sources.push_back(static_cast<const std::byte*>(own.sum.const_data_ptr()));
    }
    for (int other = 0; other < members_; ++other) {
      if (count(layout_.posted(parameter, other)) < k) continue;
      const auto place = word(layout_.place(parameter, other)).load(std::memory_order_relaxed);
      sources.push_back(at(layout_.arena(other) + place) + static_cast<std::size_t>(share.begin) * own.size_of);
    }
    if (widens) {
      auto sum = own.sum.narrow(0, 0, valid);
      for (const auto* source : sources) {
        sum.add_(at::from_blob(const_cast<std::byte*>(source), {valid}, at::TensorOptions(own.spec.gradient_type())));
      }
    } else {
      shared_memory::reduce(*value::dtype_of(own.spec.sum_type()), shared_memory::Reduction::kSum,
                            static_cast<std::byte*>(own.sum.mutable_data_ptr()), sources,
                            static_cast<std::size_t>(valid));
    }
    word(layout_.summed(parameter, member_)).store(Word{pass_, k}.pack(), std::memory_order_release);
  }

  bool finished(std::int64_t pass) {
    const std::lock_guard lock(mutex_);
    enter(pass);
    if (!ended_) {
      for (std::size_t i = 0; i < own_.size(); ++i) {
        const auto total = own_[i].posted + std::ssize(own_[i].kept);
        word(layout_.total(i, member_)).store(Word{pass_, total}.pack(), std::memory_order_relaxed);
      }
      say(layout_.ended(member_), ended_);
    }
    if (done_) return all([&](int other) { return reached(layout_.done(other)); });
    const bool all_ended = all([&](int other) { return reached(layout_.ended(other)); });
    bool all_summed = true, is_first = true;
    for (std::size_t i = 0; i < own_.size(); ++i) {
      if (!advance(i, is_first ? kAnyBytes : bytes_at_once_)) is_first = false;
      all_summed = all_summed && is_summed(i);
    }
    if (all_ended && all_summed) say(layout_.done(member_), done_);
    return false;
  }

  void say(std::size_t offset, bool& said) {
    word(offset).store(Word{pass_, 0}.pack(), std::memory_order_release);
    said = true;
  }

  // Other members that have not come to the end of the pass; where all have, those that have not given all that they
  // have, or else not summed it.
  std::vector<base::Rank> absent() {
    const std::lock_guard lock(mutex_);
    auto found = others([&](int other) { return !reached(layout_.ended(other)); });
    if (found.empty()) found = others([&](int other) { return !has_posted_all(other); });
    if (found.empty()) found = others([&](int other) { return !reached(layout_.done(other)); });
    return found;
  }

  template <class Is>
  std::vector<base::Rank> others(const Is& is) const {
    std::vector<base::Rank> found;
    for (int other = 0; other < members_; ++other) {
      if (other != member_ && is(other)) found.push_back(ranks_[other]);
    }
    return found;
  }
  bool has_posted_all(int member) const {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      if (count(layout_.posted(i, member)) < count(layout_.total(i, member))) return false;
    }
    return true;
  }

  messaging::Mailbox* const mailbox_;
  const std::shared_ptr<const Segment> segment_;
  const SharedLayout layout_;
  const std::vector<base::Rank> ranks_;
  const int member_, members_;
  std::vector<State> own_;
  std::mutex mutex_;
  Sums sums_;
  Pieces arena_;
  const std::size_t bytes_at_once_;
  std::vector<std::size_t> busy_;  // parameters with gradients of this member's under way
  std::int64_t pass_ = -1;         // that this member is in
  bool ended_ = false, done_ = false;
  bool waits_ = true;  // for others that are behind
};

}  // namespace

std::unique_ptr<Transfer> make_shared_transfer(const std::vector<Spec>& parameters, std::int64_t gradients_at_once,
                                               collective::Group& group, const collective::CallOptions& options,
                                               messaging::Mailbox* mailbox) {
  std::vector<std::size_t> value_bytes;
  std::size_t arena_bytes = 0, widest = 1;
  for (const auto& each : parameters) {
    const auto values = static_cast<std::size_t>(each.shard_numel(group.size()) * group.size());
    value_bytes.push_back(values * c10::elementSize(each.dtype));
    arena_bytes += Pieces::size(each.gradient_bytes());
    widest = std::max(widest, c10::elementSize(each.gradient_type()));
  }
  // Pages that were touched stay: what a member has ahead of the others is kept in its own memory rather.
  const auto most = static_cast<std::int64_t>(std::min(arena_bytes, kMostBytesUnderWay) / widest);
  const auto bytes_at_once = static_cast<std::size_t>(std::min(gradients_at_once, most)) * widest;
  SharedLayout layout(group.size(), std::move(value_bytes), 2 * arena_bytes);
  auto segment = group.share(layout.bytes(), options);
  if (!segment) return nullptr;
  return std::make_unique<SharedTransfer>(parameters, std::move(layout), arena_bytes, bytes_at_once,
                                          std::move(*segment), group, mailbox);
}

}  // namespace lamina::sharding
