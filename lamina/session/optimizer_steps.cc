// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/optimizer_steps.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "lamina/optim/step.h"

namespace lamina::session {
namespace {

using topology::Group;

constexpr double kEpsilon = 1e-6;  // torch's, of a norm that gradients are divided by

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

}  // namespace

OptimizerSteps::OptimizerSteps(Session& session, std::shared_ptr<optim::LossScale> scale)
    : session_(session), scale_(std::move(scale)) {
  const auto& config = session.config();
  const bool sharded = config.sharded_data_parallel_degree > 1;
  if (!config.shard_optimizer_state || sharded || session.topology().size(Group::kRdp) == 1) return;
  division_.emplace(session.groups().get(Group::kRdp, session.patience()), session.patience());
}

void OptimizerSteps::set_model(Table table, std::shared_ptr<sharding::Sharding> sharding) {
  table_ = std::move(table);
  sharding_ = std::move(sharding);
}

at::Tensor OptimizerSteps::place_of(const at::Tensor& held) {
  if (stand_ins_.find(held)) return held;
  const auto& config = session_.config();
  const bool in_float32 = (config.fp16 || config.bf16) && is_half(held);
  const bool divided = division_ && held.is_contiguous() && held.numel() > 0;
  const auto [begin, end] = divided ? division_->own(held) : std::pair<std::int64_t, std::int64_t>(0, held.numel());
  return in_float32 || divided ? stand_ins_.take(held, begin, end, in_float32) : held;
}

OptimizerSteps::Begun OptimizerSteps::begin(std::span<const at::Tensor> places, double max_norm, bool with_copies) {
  Begun begun{.factor = 1 / scale_->value()};
  if (!sharding_ && !scale_->is_on() && max_norm == kNoClipping) return begun;
  std::vector<at::Tensor> holders;
  for (const auto& place : places) {
    const auto number = stand_ins_.find(place);
    holders.push_back(number ? stand_ins_.of(*number) : place);
  }
  const distributed_optimizer::Measurers measurers{
      .table = table_(),
      .sharding = sharding_.get(),
      .pipeline = session_.members(Group::kPp),
      .everyone = session_.members(with_copies ? Group::kWorld : Group::kPp),
      .mailbox = session_.mailbox(),
      .patience = session_.patience()};
  const auto measure = distributed_optimizer::measure_gradients(holders, measurers, *optim::shared_threads());
  begun.norm = measure.norm / scale_->value();
  begun.overflow = scale_->is_on() && measure.overflow;
  begun.clipped_norm = begun.norm;
  if (const double clip = max_norm / (begun.norm + kEpsilon); !(clip >= 1)) {
    begun.factor *= clip;
    begun.clipped_norm *= clip;
  }
  return begun;
}

void OptimizerSteps::leave_out() { scale_->update(true); }

void OptimizerSteps::give_gradients(std::span<const at::Tensor> places, const Begun& begun, bool as_is) {
  const at::NoGradGuard no_grad;
  stand_ins_.give_gradients(begun.factor, as_is);
  if (as_is || begun.factor == 1) return;
  for (const auto& place : places) {
    if (!stand_ins_.find(place) && place.grad().defined()) place.mutable_grad().mul_(begun.factor);
  }
}

void OptimizerSteps::end(bool as_is) {
  if (!as_is) stand_ins_.write_back();
  stand_ins_.forget_gradients();
  if (division_) {
    std::vector<at::Tensor> divided;
    for (std::size_t i = 0; i < stand_ins_.size(); ++i) {
      const auto& of = stand_ins_.of(i);
      if (of.is_contiguous() && of.numel() > 0) divided.push_back(of);
    }
    division_->gather(divided);
  }
  if (sharding_) sharding_->after_update();
  scale_->update(false);
}

at::Tensor OptimizerSteps::part_of(const at::Tensor& place, const at::Tensor& whole) const {
  const auto number = stand_ins_.find(place);
  return number ? stand_ins_.part_of(*number, whole) : whole;
}

at::Tensor OptimizerSteps::whole_of(const at::Tensor& place, const at::Tensor& part) const {
  const auto number = stand_ins_.find(place);
  if (!number || !division_ || !stand_ins_.of(*number).is_contiguous()) return part;
  return division_->gather_parts(stand_ins_.of(*number), part);
}

}  // namespace lamina::session
