// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "lamina/collective/ranks.h"
#include "lamina/data_parallel/sharded_gradients.h"
#include "lamina/model/norm.h"
#include "lamina/model/parameter_table.h"
#include "lamina/sharding/live_values.h"
#include "lamina/sharding/transfer.h"

namespace lamina::sharding {

// Parameters of a table that are sharded, of those here: the table's rows say of each over how many ranks.
std::vector<const model::Parameter*> sharded(const model::ParameterTable& table);

// The ranks that a sharding works with; they outlive it.
struct ShardingContext {
  collective::Group& group;   // the sharding group
  collective::Group* copies;  // of this rank's shards; nullptr where there is one
  collective::Ranks ranks;
  // They take the turns of steps in one order, or have one partition: so collectives have one, too.
  bool in_order = true;
  collective::SameOrder::Turn turn = {};
  std::optional<at::ScalarType> travels = {};  // in which gradients do; none: their own
};

// Sharded data parallelism on one rank: the parameters that it has a shard of. See [Note: shards], [Note: units]. All
// members make one, outside of steps, and call what is collective in one order.
class Sharding : public data_parallel::ShardedGradients {
 public:
  struct Options {
    std::int64_t gradients = 0;  // elements that travel at a time
    Keeping keeping = {};        // of values
  };
  // Collective. `units`: the names of modules, see LiveValues. Throws base::UsageError for parameters that have left
  // the memory that the group has in common, where its members have no order.
  Sharding(std::span<const model::Parameter* const> parameters, std::span<const std::string> units, Options options,
           ShardingContext context);

  // Takes this rank's shards of the values that these parameters have here now, which go.
  void take(std::span<const model::Parameter> rows);
  // Collective: all have been taken.
  void begin();
  // The end of the job: values and shards are gone, whoever still has their tensors, and no parameter is known any
  // more.
  void close();
  // Does so, but leaves the memory of shards to whoever else has it; `why` says so behind the name of each.
  void let_go(const std::string& why);

  collective::Group& group() const { return context_.group; }  // of those who have the shards
  const std::shared_ptr<LiveValues>& values() const { return values_; }
  std::size_t size() const { return parameters_.size(); }
  const ShardedParameter& named(std::size_t parameter) const { return parameters_.at(parameter); }
  std::optional<std::size_t> find(const at::Tensor& parameter) const { return values_->find(parameter); }
  std::optional<std::size_t> find_shard(const at::Tensor& shard) const;  // whose it is
  // The tensor that an optimizer updates in the place of the parameter, with the gradient of this shard.
  at::Tensor shard(std::size_t parameter) { return transfer().shard(parameter); }

  // data_parallel::ShardedGradients.
  bool has(const at::Tensor& parameter) const override { return find(parameter).has_value(); }
  void note(const at::Tensor& parameter, std::int64_t pass) override;
  void reduce(std::int64_t pass, bool ends, const base::Patience& patience) override;
  void end_held_back() override { values_->end_pass(); }
  void abandon(const value::Failure& failure) override;
  void end_together(const std::optional<value::Failure>& failure) override;
  void require_nobody_failed() override { transfer().require_nobody_failed(); }

  // Forgets the gradient of a shard, or makes it zero, and what was summed for its next one.
  void zero_grad(std::size_t parameter, bool set_to_none);

  // Around changes of shards: collective over the sharding group.
  void before_update();
  void after_update();

  // The first of these, before an optimizer's step: sums numbers of this member's shards over the members, all of whom
  // have come when it is known.
  std::vector<double> sum_before_update(std::vector<double> numbers);

  // Collective over the sharding group, for parameters, or the gradients of their shards, with a value that this member
  // has measured of each. For a sharded one that value is of its part. The result has the parameter, and a tensor of
  // one element, the norm of all of it.
  std::vector<model::Measured> measured(std::vector<model::Measured> pairs, double norm_type);
  // The elements of the parameter that this member's shard has; what else it has pads it.
  const layout::Share& share(std::size_t parameter) const;
  // Collective over the sharding group: all members' parts, which are as large as shards, as one tensor of the
  // parameter's shape.
  at::Tensor gather(std::size_t parameter, const at::Tensor& part);
  // This member's part of a whole of the parameter's size, flattened and padded.
  at::Tensor part_of(std::size_t parameter, const at::Tensor& whole);
  // Gives this member's shard its part of a whole value. The others do so, too, between before_update() and
  // after_update().
  void write_back(std::size_t parameter, const at::Tensor& whole);

 private:
  Transfer& transfer() const;  // throws base::UsageError after close()
  void forget();
  std::vector<double> norms(std::span<const at::Tensor> parts, double norm_type);
  collective::Group& caught_up();  // the group, of whose collectives no member lacks any
  void meet(const char* purpose);
  void sum_over_copies(std::vector<at::Tensor>& sums, const base::Patience& patience);
  bool divides_first(std::size_t parameter) const;

  const ShardingContext context_;
  const base::Patience patience_;
  std::vector<ShardedParameter> parameters_;
  std::vector<Spec> specs_;
  std::vector<at::ScalarType> kept_;  // the types of gradients of shards
  std::shared_ptr<Transfer> transfer_;
  std::shared_ptr<LiveValues> values_;
  std::unordered_map<const at::TensorImpl*, std::size_t> by_shard_;
};

}  // namespace lamina::sharding
