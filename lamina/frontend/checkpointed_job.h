// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lamina/frontend/current.h"
#include "lamina/frontend/ivalues.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/job_checkpoint/job.h"

namespace lamina::frontend {

// An optimizer of the job, as its checkpoints see it.
class CheckpointedOptimizer : public job_checkpoint::OptimizerAccess {
 public:
  explicit CheckpointedOptimizer(std::shared_ptr<JobOptimizer> optimizer) : optimizer_(std::move(optimizer)) {}

  distributed_optimizer::Optimizer& engine() override { return *optimizer_->engine; }
  distributed_optimizer::UserOptimizer& user() override { return optimizer_->lent; }
  std::vector<std::string> class_names() const override;
  std::vector<value::Dict> options() const override;
  value::Value rest() const override { return value::Dict(); }
  std::vector<std::string> lacking(std::size_t group, const value::Dict& options) const override;
  void load(const std::map<std::string, value::Dict>& states, const job_checkpoint::OptimizerAbout& about) override;

 private:
  bool is_ours() const;
  Fields options_from(Fields own, const value::Dict& saved) const;

  const std::shared_ptr<JobOptimizer> optimizer_;
};

// The job, as its checkpoints see it.
class CheckpointedJob : public job_checkpoint::JobAccess {
 public:
  using Translate = std::function<std::map<std::string, at::Tensor>(std::map<std::string, at::Tensor>)>;

  // The job outlives it, and so does the content that is to be saved, if any. `translate`: see ResumeOptions.
  explicit CheckpointedJob(Current& job, const std::map<std::string, c10::IValue>* content = nullptr,
                           Translate translate = nullptr);

  bool has_model() const override { return job_.model != nullptr; }
  bool is_cut() const override;
  bool accumulates() const override;
  std::vector<job_checkpoint::NamesOf> model_state() const override;
  const model::ParameterTable& table() const override;
  sharding::Sharding* sharding() const override;
  plan::KeptPartition partition() const override;
  std::vector<job_checkpoint::OptimizerAccess*> optimizers() override;
  optim::LossScale* loss_scale() const override { return job_.loss_scale.lock().get(); }
  void settle() override;
  value::Value user_content() override;
  void take_content(const value::Value& content) override;
  void wait_for_cut(std::shared_ptr<job_checkpoint::Resumption> resumption) override;
  void load_translated(std::map<std::string, at::Tensor> state) override;
  void take_pickle(const std::filesystem::path& file, const value::Value& known) override;

  // The content of the checkpoint that was loaded.
  std::map<std::string, c10::IValue> take() { return std::move(taken_); }

 private:
  Current& job_;
  const std::map<std::string, c10::IValue>* content_;
  const Translate translate_;
  std::map<const JobOptimizer*, std::unique_ptr<CheckpointedOptimizer>> optimizers_;
  std::map<std::string, c10::IValue> taken_;
};

}  // namespace lamina::frontend
