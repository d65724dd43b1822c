// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/process_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/rank_list.h"

namespace lamina::collective {
namespace {

using Clock = base::Deadline::Clock;

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
  bool reached = false;

  void reach() {
    {
      std::lock_guard guard(mutex);
      reached = true;
    }
    changed.notify_all();
  }
};

class C10dGroup : public ProcessGroup {
 public:
  C10dGroup(c10d::ProcessGroup& group, messaging::Mailbox& mailbox, messaging::Presence& presence, GroupOptions options)
      : group_(group), mailbox_(mailbox), presence_(presence), options_(std::move(options)) {}

  int size() const override { return group_.getSize(); }

  void sum(at::Tensor& tensor) override { all_reduce(tensor, c10d::ReduceOp::SUM); }
  void max(at::Tensor& tensor) override { all_reduce(tensor, c10d::ReduceOp::MAX); }

  void broadcast(at::Tensor& tensor, int root) override {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = backend_timeout();
    std::vector<at::Tensor> tensors{tensor};
    // The others wait for no one but it, and it for all of them, should its tensor be large.
    auto awaited = options_.members;
    const auto first = awaited.at(root);
    if (first != mailbox_.rank()) awaited = {first};
    run([&] { return group_.broadcast(tensors, options); }, awaited);
  }

 private:
  void all_reduce(at::Tensor& tensor, c10d::ReduceOp::RedOpType operation) {
    c10d::AllreduceOptions options;
    options.reduceOp = operation;
    options.timeout = backend_timeout();
    std::vector<at::Tensor> tensors{tensor};
    run([&] { return group_.allreduce(tensors, options); }, options_.members);
  }

  template <class Start>
  void run(const Start& start, const std::vector<base::Rank>& awaited) {
    c10::intrusive_ptr<c10d::Work> work;
    const auto operation = presence_.next_operation(options_.members);
    blaming([&] { work = start(); });
    messaging::MutualWaits::Scope scope(presence_.waits(),
                                        {presence_.operation(options_.members, operation), what(), options_.members,
                                         [&] { return without_me(awaited); }, options_.patience.call, nullptr});
    wait(*work, operation, scope);
    blaming([&] { work->wait(); });  // it has ended: what it threw, or the order of streams
  }

  // An error of a backend is the loss of a member.
  template <class Call>
  void blaming(const Call& call) const {
    try {
      call();
    } catch (const std::exception& error) {
      blame(error);
    }
  }

  std::vector<base::Rank> without_me(std::vector<base::Rank> ranks) const {
    std::erase(ranks, mailbox_.rank());
    return ranks;
  }

  void wait(c10d::Work& work, std::int64_t operation, messaging::MutualWaits::Scope& scope) const {
    const auto end = std::make_shared<End>();
    work.getFuture()->addCallback([end](c10::ivalue::Future&) { end->reach(); });
    std::unique_lock lock(end->mutex);
    base::wait_until(
        lock, end->changed, scope.watched(patience(operation)), [&] { return end->reached; },
        [&] { return awaited(operation); });
  }

  // Our own deadline is the first to pass: it says what was waited for.
  std::chrono::milliseconds backend_timeout() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(options_.patience.timeout) + 10 * kOtherWitness;
  }

  // Also ends when a member is lost whose loss the backend does not see: one that it has no business with just now.
  base::Patience patience(std::int64_t operation) const {
    base::Patience patience = options_.patience;
    std::optional<Clock::time_point> lost_at;
    std::optional<Clock::time_point> says_present_at = Clock::now() + present_after(patience);
    patience.check_interrupt = [=, this, interrupt = options_.patience.check_interrupt]() mutable {
      if (interrupt) interrupt();
      if (says_present_at && Clock::now() >= *says_present_at) {
        presence_.say(options_.members, operation);
        says_present_at.reset();
      }
      const auto loss = mailbox_.loss(options_.members, {});
      if (!loss) return;
      if (!lost_at) lost_at = Clock::now();
      if (Clock::now() - *lost_at > kOtherWitness)
        throw base::PeerError(base::str(what(), ": ", loss->text()), loss, base::Code{"group-lost"});
    };
    return patience;
  }

  [[noreturn]] void blame(const std::exception& error) const {
    auto loss = mailbox_.loss(options_.members, kOtherWitness);
    std::string said = loss ? loss->text() : "a rank left, perhaps with less to do than the others";
    if (!loss) {  // a member that leaves because of another closes its connections some time before it ends
      loss = mailbox_.first_loss();
      if (loss) said = base::str("failed; ", loss->text());
    }
    const std::string text = error.what();
    throw base::PeerError(base::str(what(), ": ", said, "\n", text), loss, base::Code{"group-lost"});
  }

  std::string what() const { return base::str(options_.purpose, " over ", base::name_ranks(options_.members)); }

  std::string awaited(std::int64_t operation) const {
    const auto absent = presence_.absent(options_.members, operation);
    return absent.empty() ? what()
                          : base::str(what(), " without ", base::name_ranks(absent),
                                      absent.size() == 1 ? ", which has" : ", which have", " not come");
  }

  c10d::ProcessGroup& group_;
  messaging::Mailbox& mailbox_;
  messaging::Presence& presence_;
  const GroupOptions options_;
};

}  // namespace

std::unique_ptr<ProcessGroup> wrap(c10d::ProcessGroup& group, messaging::Mailbox& mailbox,
                                   messaging::Presence& presence, GroupOptions options) {
  return std::make_unique<C10dGroup>(group, mailbox, presence, std::move(options));
}

}  // namespace lamina::collective
