// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/work.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lamina/base/deadline.h"
#include "lamina/base/rank_list.h"
#include "lamina/collective/lane.h"
#include "lamina/device/failure.h"

namespace lamina::collective {
namespace {

using base::Clock;

// A backend tells of a broken connection, liveness of whose process ended. Whichever is first leaves the other this
// long: a rank that did its part may end while its last bytes are still on their way.
constexpr auto kOtherWitness = std::chrono::seconds(1);

// When a member that waits says so, before it has to say who does not: see [Note: presence].
Clock::duration present_after(const base::Patience& patience) {
  return std::min<Clock::duration>(base::kSlow, patience.timeout) / 2;
}

// When work ends. Shared with the thread of the backend that ends it.
struct End {
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t reached_ns = 0;             // 0: not yet
  std::shared_ptr<std::atomic<int>> left;  // that it is counted in until then

  void reach() {
    {
      std::lock_guard guard(mutex);
      reached_ns = observe::now_ns();
      if (left) --*left;
    }
    changed.notify_all();
  }
  // Nobody waits for it any more, or need not, for the group to be stuck by it.
  void leave(const std::shared_ptr<std::atomic<int>>& count) {
    std::lock_guard guard(mutex);
    if (reached_ns != 0 || left) return;
    left = count;
    ++*left;
  }
  bool reached() {
    std::lock_guard guard(mutex);
    return reached_ns != 0;
  }
};

// Waits, in a thread of its own, for work whose backend tells of its end only to a thread that waits, as Gloo does of a
// send or receive.
class Watcher {
 public:
  Watcher(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<End> end, std::chrono::milliseconds timeout)
      : work_(std::move(work)), end_(std::move(end)), thread_([timeout, work = work_, end = end_, error = error_] {
          try {
            work->wait(timeout);
          } catch (...) {
            *error = std::current_exception();
          }
          end->reach();
        }) {}
  ~Watcher() {
    try {
      if (!end_->reached()) work_->abort();
      thread_.join();
    } catch (const c10::Error&) {  // it cannot be given up: the thread ends with it
      thread_.detach();
    }
  }
  Watcher(const Watcher&) = delete;

  // After the end.
  void rethrow() const {
    if (*error_) std::rethrow_exception(*error_);
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::shared_ptr<End> end_;
  const std::shared_ptr<std::exception_ptr> error_ = std::make_shared<std::exception_ptr>();
  std::thread thread_;
};

class C10dWork : public Work {
 public:
  C10dWork(C10dWorkOptions options, const JobLinks& links, CallOptions call_options)
      : options_(std::move(options)), links_(links), terms_(std::move(call_options)) {
    std::erase(options_.awaited, options_.self);
    if (links_.presence == nullptr) return;
    number_ = links_.presence->next_operation(options_.group);
    const auto alike = options_.meaning.empty()
                           ? options_.group
                           : messaging::Presence::Group{base::str(options_.group.name, ": ", options_.meaning),
                                                        options_.group.members};
    const auto among_those = options_.meaning.empty() ? number_ : links_.presence->next_operation(alike);
    operation_ = links_.presence->operation(alike, among_those);
  }
  ~C10dWork() override {
    if (work_ && !waited_) end_->leave(options_.left);
  }

  void start(const std::function<c10::intrusive_ptr<c10d::Work>()>& begin) {
    began_ns_ = observe::now_ns();
    blaming([&] { work_ = begin(); });
    // The end of a group waits for what its backend cannot give up, whoever else does.
    if (!dynamic_cast<LaneWork*>(work_.get())) end_->leave(options_.left);
    if (auto future = future_of(*work_)) {
      future->addCallback([end = end_](c10::ivalue::Future&) { end->reach(); });
    } else {
      watcher_ = std::make_unique<Watcher>(work_, end_, backend_timeout(terms_));
    }
  }

  bool done() override { return end_->reached(); }

  void wait() override {
    waited_ = true;
    const auto await = [this] { wait_for_end(); };
    try {
      if (links_.around_wait && !done()) {
        links_.around_wait(await, terms_.keeps_turn);
      } else {
        await();
      }
    } catch (const base::PeerError&) {  // which ends it in time
      record(observe::now_ns());
      throw;
    } catch (...) {
      leave();
      record(observe::now_ns());
      throw;
    }
    record(end_->reached_ns);
    blaming([&] { watcher_ ? watcher_->rethrow() : void(work_->wait()); });  // it has ended: its error, or streams
  }

 private:
  static c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
    try {
      return work.getFuture();
    } catch (const c10::Error&) {
      return nullptr;
    }
  }

  // Gives the collective up for all members, where the backend can.
  void leave() {
    if (done()) return;
    if (!terms_.outlives_wait) {
      try {
        work_->abort();
        std::unique_lock lock(end_->mutex);
        end_->changed.wait_for(lock, kOtherWitness, [&] { return end_->reached_ns != 0; });
      } catch (const c10::Error&) {  // it cannot be given up
      }
    }
    end_->leave(options_.left);
  }

  // An error of a backend that says nothing else is the loss of a member.
  template <class Call>
  void blaming(const Call& call) const {
    try {
      call();
    } catch (const base::DesyncError& error) {
      throw base::DesyncError(error.what() + told_calls(), base::Code{"step-calls-differ"});
    } catch (const base::UsageError&) {
      throw;
    } catch (const std::exception& error) {
      blame(error);
    }
  }

  void wait_for_end() {
    std::optional<messaging::MutualWaits::Scope> scope;
    const auto absent = [this] { return links_.presence->absent(options_.group, number_); };
    auto watched = patience();
    if (links_.presence != nullptr) {
      scope.emplace(links_.presence->waits(), messaging::MutualWaits::Wait{operation_, what(), options_.group.members,
                                                                           [this] { return options_.awaited; },
                                                                           terms_.patience.call, nullptr, absent});
      watched = scope->watched(watched);
    }
    std::unique_lock lock(end_->mutex);
    base::wait_until(
        lock, end_->changed, watched, [&] { return end_->reached_ns != 0; }, [&] { return waits_for(scope); });
  }

  // Also ends when a member is lost whose loss the backend does not see: one that it has no business with just now.
  base::Patience patience() const {
    base::Patience patience = terms_.patience;
    std::optional<Clock::time_point> lost_at;
    std::optional<Clock::time_point> says_present_at = Clock::now() + present_after(patience);
    patience.check_interrupt = [=, this, interrupt = terms_.patience.check_interrupt]() mutable {
      if (interrupt) interrupt();
      if (links_.check_step) links_.check_step();
      if (links_.presence != nullptr && says_present_at && Clock::now() >= *says_present_at) {
        links_.presence->say(options_.group, number_);
        says_present_at.reset();
      }
      if (links_.mailbox == nullptr) return;
      const auto loss = links_.mailbox->loss(options_.group.members, {});
      if (!loss) return;
      if (!lost_at) lost_at = Clock::now();
      if (Clock::now() - *lost_at > kOtherWitness) {
        throw base::PeerError(base::str(what(), ": ", loss->text()), loss, base::Code{"group-lost"});
      }
    };
    return patience;
  }

  // The calls that the members are in, of which each hears the others: all have found that these differ.
  std::string told_calls() const {
    if (links_.mailbox == nullptr) return "";
    const auto& members = options_.group.members;
    const auto channel =
        messaging::group_channel(base::str("differs in ", options_.group.name, number_).c_str(), members);
    const auto call = terms_.patience.call ? terms_.patience.call() : base::Call();
    const auto own = base::str("; rank ", options_.self, " is in ", call.name.empty() ? terms_.purpose : call.name,
                               call.where.empty() ? "" : " at ", call.where);
    std::string words;
    const base::Patience patience{kOtherWitness, terms_.patience.check_interrupt};
    for (const auto rank : members) {
      if (rank != options_.self) links_.mailbox->send(rank, channel, own);
    }
    for (const auto rank : members) {
      try {
        words += rank == options_.self ? own : links_.mailbox->receive(rank, channel, patience).as<std::string>();
      } catch (const base::Error&) {  // without the word of one that is lost, or waits in an earlier call
      }
    }
    return words;
  }

  [[noreturn]] void blame(const std::exception& error) const {
    if (const auto failure = devices::failure()) std::rethrow_exception(failure);
    const auto* const torchs = dynamic_cast<const c10::Error*>(&error);
    const std::string text = torchs == nullptr ? error.what() : torchs->what_without_backtrace();
    const bool given_up = dynamic_cast<const base::CancelledError*>(&error) != nullptr;
    auto loss = witness(given_up);
    std::string said = given_up ? "" : "a rank left, perhaps with less to do than the others\n";
    if (loss) {
      said = loss->text() + "\n";
    } else if (links_.mailbox != nullptr) {  // one that leaves because of another closes its connections before it ends
      loss = links_.mailbox->first_loss();
      if (loss) said = base::str("failed; ", loss->text(), "\n");
    }
    throw base::PeerError(base::str(what(), ": ", said, text), loss, base::Code{"group-lost"});
  }

  // Asks why this has failed: another rank may be lost or, where a member gave it up, the step may have ended.
  std::optional<base::Loss> witness(bool given_up) const {
    if (links_.mailbox == nullptr) return std::nullopt;
    if (!given_up) return links_.mailbox->loss(options_.group.members, kOtherWitness);
    const auto deadline = base::Deadline::after(kOtherWitness);
    while (true) {
      if (links_.check_step) links_.check_step();
      auto loss = links_.mailbox->loss(options_.group.members, base::kInterruptSlice);
      if (loss || deadline.expired()) return loss;
    }
  }

  void record(std::int64_t end_ns) const {
    if (links_.recorder == nullptr || !links_.recorder->on()) return;
    links_.recorder->record({.what = observe::What::kCollective,
                             .begin_ns = began_ns_,
                             .end_ns = end_ns,
                             .name = base::str(options_.operation, " ", options_.group.name, ": ", terms_.purpose),
                             .bytes = options_.bytes});
  }

  std::string what() const { return base::str(terms_.purpose, " over ", base::name_ranks(options_.group.members)); }

  std::string waits_for(const std::optional<messaging::MutualWaits::Scope>& scope) const {
    if (!scope) return what();
    const auto awaited = scope->awaited(links_.presence->absent(options_.group, number_));
    return what() + base::without(awaited.absent) + messaging::beyond(awaited);
  }

  C10dWorkOptions options_;
  const JobLinks links_;
  const CallOptions terms_;
  std::int64_t number_ = 0;
  messaging::WaitOperation operation_;
  std::int64_t began_ns_ = 0;
  bool waited_ = false;
  c10::intrusive_ptr<c10d::Work> work_;
  const std::shared_ptr<End> end_ = std::make_shared<End>();
  std::unique_ptr<Watcher> watcher_;  // where the work has no future
};

}  // namespace

std::chrono::milliseconds backend_timeout(const CallOptions& call_options) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(call_options.patience.timeout) + 10 * kOtherWitness;
}

Started start_work(C10dWorkOptions options, const JobLinks& links, CallOptions call_options,
                   const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  auto work = std::make_unique<C10dWork>(std::move(options), links, std::move(call_options));
  work->start(start);
  return work;
}

}  // namespace lamina::collective
