// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "lamina/model/call_hooks.h"
#include "lamina/sharding/transfer.h"
#include "lamina/value/away.h"

namespace lamina::sharding {

// A parameter of the model that is sharded.
struct ShardedParameter {
  std::string name;
  at::Tensor parameter;      // the user's object
  layout::Share share = {};  // this rank's elements of it
  int replicas = 1;          // over which its gradients are averaged
};

// [Note: units] Values come for calls of modules. A unit is the whole model, or a module that has sharded parameters of
// its own, or in modules in it that are no units: never called, or not listed. Their values are here from before each
// of its forwards until after it, and again for its backward. A parameter that another module reads (a tied weight, the
// output projection of an attention) comes when it is read, and belongs from then on to the innermost unit that was
// being called, too. Units are taken to be called in the order of the last pass: the values of the next ones come
// ahead, while this one computes, or stay. Where the order is another one, these values are dropped, and come again
// when they are needed.
//
// [Note: kept values] A value may stay here when nobody holds it any more, for a unit that will: for one of the next
// ones, or as long as Keeping says. It goes, the one first that has stayed longest, where one that is needed would be
// too many. All go when a pass fails, for other members may have others, and before shards change.
struct Keeping {
  // After what a value goes: the forward of its unit; the backward, or else the end of the pass, where the call of a
  // model without gradients is one; the next update.
  enum class Until : std::uint8_t { kForward, kBackward, kUpdate };
  // When the values of units are expected whose backward is next.
  enum class Expect : std::uint8_t { kBeforeBackward, kAfterBackward, kNever };

  // Nothing comes ahead of its time, or stays for a later one, where more elements would be here.
  std::int64_t most_at_once = 0;
  Until until = Until::kForward;
  Expect expect = Expect::kBeforeBackward;
};

// The values of sharded parameters on this rank: those that are here, and the units that need them. Thread-safe.
class LiveValues : public value::Home, public model::CallHook {
 public:
  // `modules`: the names of those that may be units; the innermost of them that has a parameter is, or else the model.
  LiveValues(std::vector<ShardedParameter> parameters, std::span<const std::string> modules, Keeping keeping,
             std::shared_ptr<Transfer> transfer);
  ~LiveValues() override;

  // The end of the job, outside of passes: sends all away for ever, and knows no parameter any more.
  void close();

  // Sends one away for the first time: its memory goes.
  void send_away(std::size_t parameter);

  // The names of the modules whose calls it is to hear of.
  std::vector<std::string> units() const;

  void hold(std::size_t parameter);
  void let_go(std::size_t parameter);
  // Gives one that nobody holds a copy of its value, which may be written to, until take_back(). Throws
  // base::UsageError where somebody holds it.
  void lend(std::size_t parameter);
  void take_back(std::size_t parameter);
  // The end of a pass, whose order of calls is taken to be the next one's: lets go of what a backward alone has
  // brought, and of what stayed for this pass.
  void end_pass();
  // Gives a failed pass up: does as end_pass(), and lets go of what its backwards have held. It forgets what was
  // learned of modules since the last pass ended, of which other members may have seen more or less.
  void leave_pass();
  // Values are about to change, outside of passes: lets go of what graphs have held, and of what stayed. Throws
  // base::UsageError where somebody else holds one.
  void before_update();

  std::int64_t live() const;       // elements of values that are here
  std::int64_t most_live() const;  // at once, so far

  // One that has this memory; none where it is not sharded.
  std::optional<std::size_t> find(const at::Tensor& tensor) const;

  // value::Home, model::CallHook.
  void bring(const at::Tensor& tensor, const std::string& operation) override;
  void before_forward(const model::ModuleCall& call) override;
  void after_forward(const model::ModuleCall& call) override;
  void before_backward(const model::ModuleCall& call) override;
  void after_backward(const model::ModuleCall& call) override;

 private:
  struct Value {
    ShardedParameter named;
    std::string why;  // a use of it fails while it is away
    int holds = 0;
    std::uint32_t version = 0;  // when it came
    std::int64_t kept = 0;      // its place among those that nobody holds; 0: none
  };
  using Held = std::vector<std::size_t>;
  using Until = Keeping::Until;
  using Expect = Keeping::Expect;
  struct Unit {
    std::set<std::size_t> parameters;
    std::vector<Held> backwards;  // that run
  };
  struct Turn {
    Unit* unit;
    bool backward;
  };
  struct Frame {
    const LiveValues* of;
    Unit* unit;
    Held held;
  };
  static std::vector<Frame>& calls();  // forwards of units in this thread, the innermost last

  Unit& unit_of(const model::ModuleCall& call);
  void hold_locked(std::size_t parameter);
  void hold_each(std::span<const std::size_t> wanted);
  void let_go_locked(std::size_t parameter, Until ended);
  void let_go_of(const Held& held, Until ended);
  void come(Value& value, c10::DataPtr memory);
  void go(Value& value);
  bool is_written(std::size_t parameter) const;
  void go_unwritten(std::size_t parameter);
  bool is_needed_next(std::size_t parameter) const;
  bool take_kept(Value& value);
  void drop_oldest();
  void drop_kept();
  void drop_all();
  void enter(Unit& unit, bool backward);
  std::span<const Turn> next_turns() const;
  void expect_next(bool backwards);

  std::shared_ptr<Transfer> transfer_;  // none after close()
  mutable std::mutex mutex_;
  std::vector<Value> values_;
  std::unordered_map<const void*, std::size_t> by_tensor_, by_memory_;  // TensorImpl; StorageImpl, once it was away
  std::map<std::string, Unit> units_;                                   // by the module's name
  Held until_pass_ends_;
  std::vector<std::pair<Unit*, std::size_t>> learned_;  // since the last pass ended: parameters that units read
  std::map<std::int64_t, std::size_t>
      kept_;  // parameters whose values are here, though nobody holds them; oldest first
  std::int64_t times_kept_ = 0;
  std::vector<Turn> order_, order_now_;  // of the units, in the last pass and in this one
  std::ptrdiff_t position_ = 0;          // in the last one's
  const Keeping keeping_;
  std::int64_t live_ = 0, most_live_ = 0;
};

}  // namespace lamina::sharding
