// SPDX-License-Identifier: Apache-2.0
// States of a replica, under mutex_:
//
//   absent --enter()--> waiting --ready--> reserved --the slot grants it--> runs --leave()--> absent
//                         `--fail(), the outside has its values--> absent
//
// Threads: those of the library enter and leave, the transport's brings values and failures, the watcher sees to
// deadlines. Any of them may grant a turn, or fail the step.
//
// Locks: mutex_, under which nothing is called: not the slot, for it calls back, nor links, nor entries.
#include "lamina/graph/step.h"

#include <algorithm>
#include <chrono>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"

namespace lamina::graph {
namespace {

constexpr int kAnnouncement = -1;  // the number of the value that says what a rank does

}  // namespace

GraphStep::GraphStep(const BorderOptions& options, Links& links, const Program& program, base::Step number,
                     int microbatches, bool backward, Checksums arguments)
    : options_(options),
      links_(links),
      program_(program),
      number_(number),
      microbatches_(microbatches),
      backward_(backward),
      arguments_(std::move(arguments)),
      slot_(schedule::TeamTurns::alone(schedule::make_schedule(options.schedule, options.active_microbatches)),
            options.timeout) {
  slot_.expect(microbatches);
  for (const base::Rank rank : program.ranks) {
    if (rank != options_.rank) unheard_.insert(rank);
  }
  for (const base::Rank rank : unheard_) owed_[rank] = 1;
  for (int segment = 0; segment <= program.outside(); ++segment) {
    for (const auto& passage : program.awaited(Direction::kForward, segment)) owed_[passage.other] += microbatches;
    if (!backward) continue;
    for (const auto& passage : program.awaited(Direction::kBackward, segment)) owed_[passage.other] += microbatches;
  }
  progress_.begin(number.value);
  watcher_ = std::thread([this] { watch(); });
}

GraphStep::~GraphStep() {
  {
    std::lock_guard guard(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  slot_.cancel();
  watcher_.join();
}

ValueName GraphStep::name_of(const Replica& replica, const Program::Passage& passage, base::Rank from) const {
  return {program_.graph, number_, replica.microbatch, replica.pass, passage.value, from};
}

GraphStep::Names GraphStep::missing(const Replica& replica) const {
  Names names;
  for (const auto& passage : program_.awaited(replica.pass, replica.segment)) {
    const auto name = name_of(replica, passage, passage.other);
    if (!values_.contains(name)) names.push_back(name);
  }
  if (replica.pass == Direction::kForward && !takes_turns(replica)) {
    for (const base::Rank rank : unheard_) names.push_back(announcement_of(rank));
  }
  return names;
}

bool GraphStep::ready(const Replica& replica) const {
  if (replica.pass == Direction::kForward && takes_turns(replica)) {
    const auto found = begun_.find(replica.segment);
    if (replica.microbatch.value != (found == begun_.end() ? 0 : found->second)) return false;
  }
  return missing(replica).empty();
}

std::vector<TensorBytes> GraphStep::take(const Replica& replica) {
  std::vector<TensorBytes> taken;
  for (const auto& passage : program_.awaited(replica.pass, replica.segment)) {
    taken.push_back(std::move(values_.extract(name_of(replica, passage, passage.other)).mapped()));
  }
  return taken;
}

ValueName GraphStep::announcement_of(base::Rank rank) const {
  return {program_.graph, number_, base::Microbatch(0), Direction::kForward, kAnnouncement, rank};
}

std::vector<std::uint64_t> GraphStep::announcement() const {
  std::vector<std::uint64_t> words{static_cast<std::uint64_t>(microbatches_), backward_};
  for (const auto& [name, checksum] : arguments_) words.push_back(checksum);
  return words;
}

void GraphStep::announce() {
  const auto words = std::make_shared<const std::vector<std::uint64_t>>(announcement());
  const TensorBytes value{.shape = {static_cast<std::int64_t>(words->size())},
                          .data = {words, words->data()},
                          .size_bytes = words->size() * sizeof(std::uint64_t)};
  try {
    for (const base::Rank rank : program_.ranks) {
      if (rank != options_.rank) links_.send(rank, announcement_of(options_.rank), value);
    }
  } catch (...) {
    fail(std::current_exception(), Tell::kOthers);
  }
}

void GraphStep::compare(base::Rank other, const TensorBytes& announced) {
  const auto* first = static_cast<const std::uint64_t*>(announced.data.get());
  const std::vector<std::uint64_t> theirs(first, first + announced.size_bytes / sizeof(std::uint64_t));
  const auto own = announcement();
  std::string what;
  if (theirs[0] != own[0]) {
    what =
        base::str("rank ", other, " has ", theirs[0], " microbatches in it, and rank ", options_.rank, " has ", own[0]);
  } else if (theirs[1] != own[1]) {
    what = base::str("rank ", theirs[1] != 0 ? other : options_.rank, " takes gradients in it, and rank ",
                     theirs[1] != 0 ? options_.rank : other, " takes none");
  } else if (std::min(theirs.size(), own.size()) > 2 && theirs.size() != own.size()) {
    what = base::str("its function has ", theirs.size() - 2, " arguments on rank ", other, ", and ", own.size() - 2,
                     " on rank ", options_.rank);
  } else {
    for (std::size_t i = 2; i < std::min(theirs.size(), own.size()) && what.empty(); ++i) {
      if (theirs[i] == own[i]) continue;
      what = base::str("argument ", arguments_[i - 2].first, " differs between rank ", std::min(other, options_.rank),
                       " and rank ", std::max(other, options_.rank));
    }
  }
  if (what.empty()) return;
  fail(std::make_exception_ptr(base::DesyncError(
           base::str("step ", number_, " of ", options_.of, ": ", what,
                     "; all ranks call the same step functions in the same order, with the same arguments"))),
       Tell::kOthers);
}

void GraphStep::enter(const Replica& replica, Entry entry) {
  std::exception_ptr error;
  bool gives_slot_up = false;
  {
    Lock lock(mutex_);
    error = error_;
    if (!error) {
      waiting_[replica] = {std::move(entry), base::Clock::now()};
      gives_slot_up = replica.pass == Direction::kBackward && keeps_slot_.erase(replica.microbatch) > 0;
    }
  }
  if (error) return entry.fail(error);
  look_at(replica);
  if (gives_slot_up) slot_.release();
}

void GraphStep::look_at(const Replica& replica) {
  Lock lock(mutex_);
  const auto found = waiting_.find(replica);
  if (found == waiting_.end() || found->second.reserved || !ready(replica)) return;
  if (takes_turns(replica)) {
    found->second.reserved = true;
    lock.unlock();
    slot_.reserve(program_.phase(replica.pass, replica.segment), replica.microbatch,
                  [this, replica] { grant(replica); });
    return;
  }
  auto entry = std::move(found->second.entry);
  waiting_.erase(found);
  auto values = take(replica);
  lock.unlock();
  entry.go(std::move(values));
}

void GraphStep::grant(const Replica& replica) {
  Lock lock(mutex_);
  auto node = waiting_.extract(replica);
  if (!node) return;  // the step has failed meanwhile
  auto values = take(replica);
  running_[replica] = observe::now_ns();
  const bool forward = replica.pass == Direction::kForward;
  if (forward) ++begun_[replica.segment];
  lock.unlock();
  node.mapped().entry.go(std::move(values));
  if (forward) look_at({Direction::kForward, replica.segment, base::Microbatch(replica.microbatch.value + 1)});
}

void GraphStep::leave(const Replica& replica, const std::vector<TensorBytes>& outputs) {
  if (const auto error = this->error()) std::rethrow_exception(error);
  const auto sent = program_.sent(replica.pass, replica.segment);
  base::internal_check(sent.size() == outputs.size(), "a segment with other outputs than its program has");
  try {
    for (std::size_t i = 0; i < sent.size(); ++i) {
      links_.send(sent[i].other, name_of(replica, sent[i], options_.rank), outputs[i]);
    }
  } catch (...) {
    fail(std::current_exception(), Tell::kOthers);
    throw;
  }
  if (takes_turns(replica)) {
    pass_slot_on(replica);
  } else if (replica.pass == Direction::kBackward) {
    slot_.forward_done();
  }
}

void GraphStep::pass_slot_on(const Replica& left) {
  const bool last_forward = left.pass == Direction::kForward && left.segment == program_.outside() - 1;
  bool keeps = false;
  std::int64_t began_ns = 0;
  {
    Lock lock(mutex_);
    began_ns = running_.extract(left).mapped();
    keeps = last_forward && backward_ && program_.keeps_slot_over_loss();
    if (keeps) keeps_slot_.insert(left.microbatch);
  }
  record(left, began_ns);
  if (last_forward && !backward_) slot_.forward_done();
  if (backward_ ? left.pass == Direction::kBackward && left.segment == 0 : last_forward) slot_.finished();
  if (!keeps) slot_.release();
}

void GraphStep::record(const Replica& left, std::int64_t began_ns) {
  if (options_.recorder == nullptr || !options_.recorder->on()) return;
  using observe::What;
  options_.recorder->record({.what = left.pass == Direction::kForward ? What::kForward : What::kBackward,
                             .begin_ns = began_ns,
                             .end_ns = observe::now_ns(),
                             .step = number_.value,
                             .microbatch = left.microbatch.value,
                             .name = program_.segments[left.segment].name});
}

void GraphStep::record_end() {
  if (options_.recorder == nullptr || !options_.recorder->on()) return;
  options_.recorder->record(
      {.what = observe::What::kStep, .begin_ns = began_ns_, .end_ns = observe::now_ns(), .step = number_.value});
  options_.recorder->save_sometimes();
}

void GraphStep::receive(const ValueName& name, TensorBytes value) {
  const bool is_announcement = name.value == kAnnouncement;
  if (is_announcement) compare(name.from, value);
  std::vector<Replica> waiters;
  {
    Lock lock(mutex_);
    if (error_ || over_) return;
    --owed_[name.from];
    if (is_announcement) {
      unheard_.erase(name.from);
    } else {
      values_[name] = std::move(value);
    }
    for (const auto& [replica, waiting] : waiting_) {
      const bool awaits =
          is_announcement ? !takes_turns(replica) : replica.pass == name.pass && replica.microbatch == name.microbatch;
      if (awaits) waiters.push_back(replica);
    }
  }
  for (const Replica& waiter : waiters) look_at(waiter);
}

void GraphStep::lose(const base::Loss& loss) {
  {
    Lock lock(mutex_);
    const auto owed = owed_.find(loss.rank);
    if (owed == owed_.end() || owed->second == 0) return;
  }
  fail(std::make_exception_ptr(
           base::PeerError(base::str("step ", number_, " of ", options_.of, ": ", loss.text()), loss)),
       Tell::kOthers);
}

void GraphStep::fail(std::exception_ptr error, Tell tell) {
  std::string why;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& thrown) {
    why = thrown.what();
  }
  if (tell == Tell::kOthers) why = base::str("rank ", options_.rank, ": ", why);
  fail(std::move(error), why, tell);
}

void GraphStep::fail(std::exception_ptr error, const std::string& why, Tell tell) {
  std::map<Replica, Waiting> ended;
  Failed failed;
  {
    Lock lock(mutex_);
    if (error_ || over_) return;
    error_ = error;
    ended.swap(waiting_);
    failed.swap(failed_);
    values_.clear();
    why_ = why;
  }
  progress_.end(number_.value);
  record_end();
  changed_.notify_all();
  slot_.cancel();
  if (tell == Tell::kOthers) links_.tell_failure(number_, why);
  if (failed) failed(error, why);  // before the program goes on
  for (auto& [replica, waiting] : ended) waiting.entry.fail(error);
}

void GraphStep::when_it_fails(Failed call) {
  std::exception_ptr error;
  std::string why;
  {
    Lock lock(mutex_);
    error = error_;
    why = why_;
    if (!error) failed_ = std::move(call);
  }
  if (error) call(error, why);
}

void GraphStep::fail_here() {
  std::string ran;
  {
    Lock lock(mutex_);
    for (const auto& [replica, since] : running_) ran += base::str(ran.empty() ? " in " : ", ", text(replica));
  }
  fail(std::make_exception_ptr(base::Error(
           base::str("step ", number_, " of a graph: an operation has failed", ran, "; its rank shows the error"))),
       Tell::kOthers);
}

std::exception_ptr GraphStep::error() const {
  std::lock_guard guard(mutex_);
  return error_;
}

void GraphStep::end() {
  {
    Lock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    over_ = true;
    values_.clear();
  }
  progress_.end(number_.value);
  record_end();
  changed_.notify_all();
  if (at_end_) at_end_();
}

std::string GraphStep::text(const Replica& replica) const {
  return base::str(replica.pass == Direction::kForward ? "forward" : "backward", " of ",
                   program_.segments[replica.segment].name, " (microbatch ", replica.microbatch, ")");
}

std::string GraphStep::awaited_by(const Replica& replica) const {
  const auto names = missing(replica);
  if (!names.empty()) {
    const auto& first = names.front();
    if (first.value == kAnnouncement) return base::str("rank ", first.from, ", which has not entered the step");
    return base::str("the ", first.pass == Direction::kForward ? "value" : "gradient", " of ",
                     program_.values[first.value], " from rank ", first.from);
  }
  if (!waiting_.at(replica).reserved) return "the microbatch before it, which has not come here";
  if (!running_.empty()) return base::str("its turn on this rank, which ", text(running_.begin()->first), " has");
  return "its turn on this rank";
}

void GraphStep::watch() {
  Lock lock(mutex_);
  const auto slice = std::min<base::Clock::duration>(base::kSlow / 10, options_.timeout / 4);
  while (!over_ && !error_) {
    changed_.wait_for(lock, slice);
    const auto now = base::Clock::now();
    std::vector<std::string> slow;
    std::string late;
    for (auto& [replica, waiting] : waiting_) {
      const auto waited = now - waiting.since;
      const auto line = [&] {
        return base::str("step ", number_, " of ", options_.of, ": ", text(replica), " waits for ", awaited_by(replica),
                         ": no answer for ", std::chrono::duration_cast<std::chrono::seconds>(waited).count(), " s");
      };
      if (waited > options_.timeout && late.empty()) late = line();
      if (waited > base::kSlow && !std::exchange(waiting.told, true)) slow.push_back(line());
    }
    lock.unlock();
    for (const auto& line : slow) base::log_warning(line + ", still waiting");
    if (!late.empty()) {
      fail(std::make_exception_ptr(base::TimeoutError(late + "; raise timeout_s if it needs longer")), Tell::kOthers);
    }
    lock.lock();
  }
}

}  // namespace lamina::graph
