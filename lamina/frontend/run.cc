// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/run.h"

#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lamina/frontend/current.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/layout_change.h"
#include "lamina/frontend/model.h"
#include "lamina/job_checkpoint/saves.h"
#include "lamina/session/survivors.h"

namespace lamina {
namespace {

using frontend::JobOptimizer;

base::UsageError refused(const std::string& why) {
  return base::UsageError("lamina::Run: " + why, base::Code{"elastic-refused"});
}

// The state of an optimizer as its archives have it, and back.
std::string to_bytes(const JobOptimizer::Own& own) {
  torch::serialize::OutputArchive archive;
  frontend::write(frontend::from_rows(own.rows, own.options), archive);
  std::ostringstream bytes;
  archive.save_to(bytes);
  return std::move(bytes).str();
}

JobOptimizer::Own from_bytes(const std::string& bytes) {
  std::istringstream file(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  const auto state = frontend::read(archive);
  JobOptimizer::Own own{.rows = frontend::rows_of(state), .options = {}};
  for (const auto& group : state.groups) own.options.push_back(group.options);
  return own;
}

// The only optimizer of a job that goes on without some of its ranks.
std::shared_ptr<JobOptimizer> checked_optimizer() {
  const auto& job = frontend::outside_step("lamina::Run()");
  auto optimizers = frontend::optimizers_of(job);
  if (job.model == nullptr || optimizers.size() != 1) {
    throw refused("the job has a DistributedModel, and one DistributedOptimizer, before");
  }
  if (const auto why = session::why_no_survivors(*job.session); !why.empty()) throw refused(why);
  return optimizers.front();
}

}  // namespace

// The loop of a program, as `Survivors` see it: its progress are its updates.
class Run::Training : public session::CopiesFace {
 public:
  Training(std::shared_ptr<JobOptimizer> optimizer, RunOptions options)
      : optimizer_(std::move(optimizer)), options_(std::move(options)), survivors_(*this) {
    optimizer_->after_step = [this] {
      ++updates_;
      survivors_.keep();
    };
  }
  ~Training() override {
    optimizer_->after_step = [] {};
  }

  std::int64_t progress() const override { return updates_; }
  std::shared_ptr<session::Session> session() const override { return frontend::current().session; }
  std::vector<at::Tensor> buffers() const override { return frontend::current().model->tree().root()->buffers(); }
  session::FaceHooks hooks() const override { return frontend::face_hooks(); }
  void go_over(std::shared_ptr<session::Session> session) override {
    if (!own_) own_ = optimizer_->own();
    for (auto& parameter : frontend::current().model->tree().root()->parameters()) parameter.mutable_grad().reset();
    frontend::go_over(std::move(session), std::nullopt, std::nullopt);
  }
  value::Value states() const override {
    return value::Tuple{{updates_, to_bytes(*own_), options_.state ? options_.state() : Value()}};
  }
  void take(const value::Value* states) override {
    if (states != nullptr) {
      const auto& items = states->as<value::Tuple>().items;
      updates_ = items.at(0).as<std::int64_t>();
      own_ = from_bytes(items.at(1).as<std::string>());
      if (options_.take) options_.take(items.at(2));
    }
    optimizer_->load(*own_);
    optimizer_->lent.count_anew();
    own_.reset();
  }

  void go_on() {
    if (!frontend::has_current() || !survivors_.may_go_on(std::current_exception())) throw;
    if (const auto& saves = frontend::current().saves) saves->drop();
    const auto progress = survivors_.go_on();
    const bool is_again = std::ranges::adjacent_find(progress, std::not_equal_to()) == progress.end();
    survivors_.tell_going_on(is_again ? updates_ : updates_ - 1, is_again);
  }

 private:
  const std::shared_ptr<JobOptimizer> optimizer_;
  const RunOptions options_;
  std::int64_t updates_ = 0;
  std::optional<JobOptimizer::Own> own_;  // state of the optimizer, while it goes over
  session::Survivors survivors_;
};

Run::Run(RunOptions options) : training_(std::make_unique<Training>(checked_optimizer(), std::move(options))) {}
Run::~Run() = default;

std::int64_t Run::updates() const { return training_->progress(); }
void Run::go_on() { training_->go_on(); }

}  // namespace lamina
