// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/environment/progress.h"
#include "lamina/graph/links.h"
#include "lamina/graph/program.h"
#include "lamina/runtime/compute_slot.h"

namespace lamina::graph {

// [Note: replicas] Each microbatch has a replica of each segment, forward and back. The operation before it enters it,
// and waits in no thread. It is ready when the values of other ranks are here and the forward of the microbatch before
// has begun: state of the model changes in the order of microbatches. The slot grants it its turn ([Note: compute
// slot]); then it runs. It leaves when its outputs are sent, and gives the slot up.
struct Replica {
  Direction pass = Direction::kForward;
  int segment = 0;
  base::Microbatch microbatch;

  friend auto operator<=>(const Replica&, const Replica&) = default;
};

// [Note: announcements] A rank that enters a step tells the others what it does there: whether microbatches go back,
// and in some steps what the checksums of the arguments are. Nothing gets out of the model before all have said the
// same, so ranks that call a function in different ways get an error, and no numbers.

// One step of graphs on this rank. The first error ends it, here and on the other ranks: all that waits in it is told,
// and what enters it later, too. From any thread.
class GraphStep {
 public:
  // Goes on with a replica that has entered, or ends it. Called once each, one of the two, by any thread, without
  // locks: it is to hand over and return.
  struct Entry {
    std::function<void(std::vector<TensorBytes>)> go;  // its values, in the order of Program::awaited()
    std::function<void(std::exception_ptr)> fail;
  };
  enum class Tell : bool { kNobody, kOthers };  // of a failure
  // Gets the error, and it in the words that other ranks are told.
  using Failed = std::function<void(const std::exception_ptr&, const std::string&)>;

  GraphStep(const BorderOptions& options, Links& links, const Program& program, base::Step number, int microbatches,
            bool backward, Checksums arguments = {});
  ~GraphStep();
  GraphStep(const GraphStep&) = delete;

  base::Step number() const { return number_; }
  const Program& program() const { return program_; }

  void announce();  // once, before it enters anything
  void enter(const Replica& replica, Entry entry);
  // Sends its outputs, in the order of Program::sent(). What that throws ends the step, and is thrown on.
  void leave(const Replica& replica, const std::vector<TensorBytes>& outputs);

  void fail(std::exception_ptr error, Tell tell);
  // As another step has, which others are told in these words.
  void fail_with(std::exception_ptr error, const std::string& why) { fail(std::move(error), why, Tell::kOthers); }
  // An operation has failed: the error is the library's to show, here. The others are told what ran meanwhile.
  void fail_here();
  std::exception_ptr error() const;
  // Called by end(), where the step has not failed. Before it enters anything.
  void when_it_ends(std::function<void()> call) { at_end_ = std::move(call); }
  // Called once it has failed, which may be now; without locks. Once.
  void when_it_fails(Failed call);
  // Nothing waits any more. Throws the step's error.
  void end();

  // From the transport's thread. A rank that has left, with all that this one needs of it sent, ends nothing.
  void lose(const base::Loss& loss);
  void receive(const ValueName& name, TensorBytes value);

 private:
  struct Waiting {
    Entry entry;
    base::Clock::time_point since;
    bool reserved = false;  // in the slot's queue
    bool told = false;      // that it takes long
  };
  using Lock = std::unique_lock<std::mutex>;
  using Names = std::vector<ValueName>;

  void fail(std::exception_ptr error, const std::string& why, Tell tell);
  bool takes_turns(const Replica& replica) const { return replica.segment != program_.outside(); }
  ValueName name_of(const Replica& replica, const Program::Passage& passage, base::Rank from) const;
  Names missing(const Replica& replica) const;  // under the lock
  ValueName announcement_of(base::Rank rank) const;
  std::vector<std::uint64_t> announcement() const;
  void compare(base::Rank other, const TensorBytes& announced);
  bool ready(const Replica& replica) const;  // under the lock
  std::vector<TensorBytes> take(const Replica& replica);
  void look_at(const Replica& replica);  // reserves its turn, or lets it go, once it is ready
  void grant(const Replica& replica);
  void pass_slot_on(const Replica& left);
  void record(const Replica& left, std::int64_t began_ns);
  void record_end();
  void watch();
  std::string text(const Replica& replica) const;
  std::string awaited_by(const Replica& replica) const;  // under the lock

  const BorderOptions options_;
  Links& links_;
  const Program& program_;
  const base::Step number_;
  const int microbatches_;
  const bool backward_;
  const Checksums arguments_;  // empty where they are not compared
  const environment::ProgressReporter progress_;
  const std::int64_t began_ns_ = observe::now_ns();
  runtime::ComputeSlot slot_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // it has ended
  std::map<Replica, Waiting> waiting_;
  std::map<ValueName, TensorBytes> values_;
  std::map<base::Rank, int> owed_;           // values that each rank has yet to send
  std::set<base::Rank> unheard_;             // that have yet to say what they do
  std::map<int, int> begun_;                 // per segment: forwards
  std::map<Replica, std::int64_t> running_;  // since when, by the recorder's clock
  std::set<base::Microbatch> keeps_slot_;    // from its last forward to its first backward
  std::function<void()> at_end_;
  Failed failed_;
  std::exception_ptr error_;
  std::string why_;  // in the words that others are told
  bool over_ = false;
  std::thread watcher_;
};

}  // namespace lamina::graph
