// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/resumption.h"

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/job_checkpoint/together.h"

namespace lamina::job_checkpoint {

plan::KeptPartition Resumption::partition() const {
  const bool fits = about_.layout && about_.layout->pp == JobLayout::of(job_->ranks().topology).pp;
  return fits ? about_.partition : plan::KeptPartition();
}

void Resumption::check() const {
  const auto* table = job_->is_cut() ? &job_->table() : nullptr;
  const auto whole_shape = [&](const at::Tensor& tensor) {
    const auto* row = table == nullptr ? nullptr : table->find(tensor);
    return row == nullptr ? job_->whole_shape(tensor) : row->layout.shape;
  };
  const auto left_out = reader_->check_model(job_->model_state(), whole_shape, strict_);
  if (!left_out.empty() && job_->peers().is_first()) base::log_warning(left_out);
  job_->take_extra_states(about_.extra_state);
  if (of_optimizers_ == OfOptimizers::kAll) check_optimizers(job_->optimizers(), about_.optimizers, strict_);
}

void Resumption::load_options() {
  if (of_optimizers_ != OfOptimizers::kAll) return;
  const auto optimizers = job_->optimizers();
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    have_options_.push_back(optimizers[i]->load_options(about_.optimizers.at(i)));
  }
}

void Resumption::keep_options() { have_options_.assign(about_.optimizers.size(), true); }

void Resumption::want_model(const Parts& parts) {
  for (const auto& [names, tensor] : job_->model_state()) {
    const auto* row = parts.table().find(tensor);
    const auto* saved = reader_->saved_name(names);
    if (row == nullptr || !parts.table().is_here(*row) || saved == nullptr) continue;
    if (*saved != row->layout.name) {
      throw base::UsageError(
          base::str(row->layout.name, " is tied, and saved as ", *saved, ", which is another tensor here"),
          base::Code{"checkpoint-names"});
    }
    const auto [kind, optimizer] = reader_->best_source(*saved, tensor.scalar_type());
    reader_->want_row(parts, *saved, kind, optimizer, held_here(*job_, tensor));
  }
}

void Resumption::load() {
  const auto peers = job_->peers();
  job_->begin_load();
  std::vector<WantedStates> states;
  together(peers, [&] {
    check();
    const Parts parts(job_->ranks(), job_->table());
    want_model(parts);
    const auto optimizers =
        of_optimizers_ == OfOptimizers::kNothing ? std::vector<OptimizerAccess*>() : job_->optimizers();
    for (std::size_t i = 0; i < optimizers.size(); ++i) {
      want_masters(static_cast<int>(i), *optimizers[i], parts, *reader_);
      if (of_optimizers_ == OfOptimizers::kMasters) continue;
      auto& about = about_.optimizers.at(i);
      if (i < have_options_.size() && have_options_[i]) {
        auto options = optimizers[i]->options();
        for (std::size_t k = 0; k < about.groups.size(); ++k) about.groups[k].options = std::move(options.at(k));
      }
      states.emplace_back(static_cast<int>(i), *optimizers[i], about, parts, *reader_);
    }
  });
  together(peers, [&] { reader_->read(peers); });  // [Note: two reads]
  job_->wait_for_cut(nullptr);
  auto* sharding = job_->sharding();
  if (sharding != nullptr) sharding->before_update();
  together(peers, [&] { reader_->fill_model(peers); });
  if (sharding != nullptr) sharding->after_update();
  for (auto* optimizer : job_->optimizers()) optimizer->engine().follow();
  together(peers, [&] {
    reader_->fill_optimizers(peers);
    job_->load_extra_states();
    for (auto& each : states) each.load();
  });
}

void require_none_waits(const Resumption* waiting, const std::string& call) {
  if (waiting != nullptr) throw faces::refusal("state-waits", "a checkpoint", "call " + call);
}

void Resumption::go_on() const {
  auto* scale = job_->loss_scale();
  if (of_optimizers_ != OfOptimizers::kNothing && about_.loss_scale && scale != nullptr && scale->is_dynamic()) {
    scale->set_state(*about_.loss_scale);
  }
  auto& seeds = job_->steps().seeds();
  if (about_.seeded_steps && seeds.steps()) seeds.go_on_after(*about_.seeded_steps);
}

}  // namespace lamina::job_checkpoint
