// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "lamina/collective/ranks.h"
#include "lamina/config/config.h"
#include "lamina/distributed_optimizer/owners.h"
#include "lamina/distributed_optimizer/shard_ranks.h"
#include "lamina/distributed_optimizer/slice_ranks.h"
#include "lamina/distributed_optimizer/stand_ins.h"
#include "lamina/model/parameter_table.h"
#include "lamina/optim/step.h"
#include "lamina/sharding/sharding.h"

namespace lamina::distributed_optimizer {

// The parameters of a model as an optimizer of one rank has them in its groups. There each is itself, a shard, or a
// stand-in for either: see [Note: local shards], [Note: stand-ins]. Outside of steps of the pipeline; all ranks do the
// same.
class LocalParameters {
 public:
  // Gives nullptr before the model is cut.
  using Table = std::function<const model::ParameterTable*()>;

  // Collective over the world, the first time in a job: makes groups.
  LocalParameters(collective::Ranks ranks, const config::Config& config);

  // When the model is cut. No sharding: nothing is sharded.
  void set_model(Table table, std::shared_ptr<sharding::Sharding> sharding);
  bool are_cut() const { return are_cut_; }  // set_model() has been called
  const model::ParameterTable* table() const { return table_(); }
  sharding::Sharding* sharding() const { return sharding_.get(); }

  // Gives what the groups are to have for a parameter of the model, whose table it is, or for this rank's shard of one;
  // any other tensor itself.
  at::Tensor local(const at::Tensor& held, const model::ParameterTable& table);
  // Gives the parameter or shard that `local` stands for, which has its gradient; itself, where it is none.
  const at::Tensor& source(const at::Tensor& local) const;
  // True of a parameter that is not the model's, nor stands for one: see [Note: beside the model].
  bool is_beside(const at::Tensor& held, const model::ParameterTable& table) const;
  // True where groups hold other tensors than the model's parameters, on this or on another rank.
  bool replaces() const { return replaces_; }

  // Says what a tensor of the groups is a part of; none for what is whole here.
  std::optional<LocalShard> shard(const at::Tensor& local) const;
  bool is_master(const at::Tensor& local) const;
  bool is_stand_in(const at::Tensor& local) const { return stand_ins_.find(local).has_value(); }
  // The gradient of a stand-in between steps: its part of the other's. Undefined where there is none; and one in its
  // place, or none.
  at::Tensor gradient(const at::Tensor& stand_in);
  void set_gradient(const at::Tensor& stand_in, const at::Tensor& gradient);
  // The group that holds the parts; none where all is whole. See model::updates_divided_over().
  std::optional<topology::Group> divided_over() const { return divided_over_; }
  std::vector<base::Rank> members(topology::Group group) const { return ranks_.topology.members(group, ranks_.own); }
  // True of what is a shard or a slice, of which other ranks have the rest.
  bool is_part(const at::Tensor& local) const { return slicing(local) != nullptr || shard(local).has_value(); }
  // True where some parameter is in slices.
  bool have_slices() const;
  // The sizes of all of a parameter, of which a tensor here may be a slice.
  std::vector<std::int64_t> sizes_of_whole(const at::Tensor& parameter) const;
  // This rank's part of a state like a parameter, or like its slice, and all of it from the parts: collective over the
  // holders.
  at::Tensor part_of(const at::Tensor& local, const at::Tensor& whole) const;
  at::Tensor whole_of(const at::Tensor& local, const at::Tensor& value) const;
  // Joins the parts of this rank's slice: collective over those who hold these.
  at::Tensor slice_of(const at::Tensor& local, const at::Tensor& value) const;

  // Gives stand-ins what was written to the parameters they stand for.
  void follow() { stand_ins_.follow(); }
  // Gives parameters on all holders what a program has written to their parts, which all holders do: collective over
  // them then, and nothing else.
  void share_written();

  // A step. Gives each of these its gradient, multiplied by the factor, until the step ends; `as_is`, where whoever
  // updates multiplies them itself, and gives halves their values.
  void begin_step(std::span<const at::Tensor> locals, double factor, bool as_is);
  // As optim::step_groups(), of what stands in groups, as it is: what is measured of parts is combined, collectively
  // over the holders, and halves get the values of their masters.
  void update(const optim::Functional& functional, std::span<optim::GroupStep> groups, optim::Threads& threads) const;
  bool in_step() const { return in_step_; }
  // All are updated: so are the parameters, on all ranks. Gradients in their own memory have the loss scale again, and
  // stay clipped, as torch's functions leave them.
  void end_step(bool as_is, double scale);
  // Undoes what a step that failed has left.
  void abandon_step();

  // For an optimizer that needs all of a parameter, within a step: see [Note: owners]. All call spread_wholes() when
  // its groups have new members, then around each update what is collective over the holders: begin_wholes() says what
  // each member is in the update, end_wholes() gives all parts their values.
  void spread_wholes(std::span<const at::Tensor> locals);
  bool updates_whole(const at::Tensor& local) const;  // of which that is this rank's part
  std::vector<at::Tensor> begin_wholes(std::span<const at::Tensor> locals);
  void end_wholes();
  void forget_wholes();  // of an update that failed

 private:
  void hold_in(collective::Group& group);
  // The row of a parameter, or of one that is sharded.
  const model::Parameter* row_of(const at::Tensor& held, const model::ParameterTable& table) const;
  // How the parameter is sliced that `local` stands for; nullptr where it is not.
  const layout::Slicing* slicing(const at::Tensor& local) const;
  Owners::Held held(const at::Tensor& local) const;

  const collective::Ranks ranks_;
  const SliceRanks slice_ranks_;
  const std::optional<topology::Group> divided_over_;
  const bool replaces_;
  bool are_cut_ = false;
  std::unique_ptr<ShardRanks> shard_ranks_;  // none where every parameter is whole
  std::optional<Owners> owners_;
  Table table_ = [] { return nullptr; };
  std::shared_ptr<sharding::Sharding> sharding_;
  StandIns stand_ins_;
  bool in_step_ = false;
  std::vector<std::pair<at::Tensor, double>> multiplied_;  // in a step: gradients in their own memory, by how much
};

}  // namespace lamina::distributed_optimizer
