// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/run.h"

#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/layout_change.h"
#include "lamina/frontend/model.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/job_checkpoint/saves.h"
#include "lamina/messaging/agreement.h"
#include "lamina/messaging/same_arguments.h"
#include "lamina/session/next_layout.h"
#include "lamina/session/part_survivors.h"
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

std::vector<std::string> layouts_of(const RunOptions& options) {
  std::vector<std::string> layouts;
  for (const auto& layout : options.layouts) layouts.push_back(layout.json);
  return layouts;
}

// The only optimizer of a job that goes on without some of its ranks.
std::shared_ptr<JobOptimizer> checked_optimizer(const RunOptions& options) {
  const auto& job = frontend::outside_step("lamina::Run()");
  auto optimizers = frontend::optimizers_of(job);
  if (job.model == nullptr || optimizers.size() != 1) {
    throw refused("the job has a DistributedModel, and one DistributedOptimizer, before");
  }
  auto& session = *job.session;
  if (const auto why = session::why_no_survivors(session, /*keeps_parts=*/true); !why.empty()) throw refused(why);
  const auto differing = messaging::differing_arguments(
      session.mailbox(), session.members(topology::Group::kWorld), "lamina::Run()",
      {{"keep_every", options.keep_every ? base::str(*options.keep_every) : "auto"}}, session.patience());
  if (!differing.empty()) throw refused(differing);
  if (options.keep_every && *options.keep_every < 1) {
    throw faces::refusal("not-a-count", "keep_every", *options.keep_every);
  }
  const auto layouts = layouts_of(options);
  session::require_layouts(session, layouts);
  return optimizers.front();
}

std::shared_ptr<torch::nn::Module> root() { return frontend::current().model->tree().root(); }

bool is_in_training_mode() {
  return std::ranges::any_of(root()->modules(), [](const auto& module) { return module->is_training(); });
}

std::vector<std::pair<std::string, at::Tensor>> named(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& each : tensors) all.emplace_back(each.key(), each.value());
  return all;
}

// Lists what newcomers are to have in common with this process.
session::Facts facts_of(const JobOptimizer& optimizer) {
  auto tensors = named(root()->named_parameters());
  std::ranges::move(named(root()->named_buffers()), std::back_inserter(tensors));
  std::vector<std::size_t> groups;
  for (const auto& group : optimizer.members()) groups.push_back(group.size());
  const auto& model = *frontend::current().model;
  const auto& user = *optimizer.optimizer;
  return session::facts_of_training("program", "/proc/self/exe", tensors,
                                    model.partitioned() ? &model.table() : nullptr, c10::demangle(typeid(user).name()),
                                    groups);
}

}  // namespace

// The loop of a program: its progress are its updates.
class Run::Training {
 public:
  Training(std::shared_ptr<JobOptimizer> optimizer, RunOptions options)
      : optimizer_(std::move(optimizer)), options_(std::move(options)) {}
  // It has come as far as that one.
  explicit Training(const Training& before)
      : optimizer_(before.optimizer_), options_(before.options_), updates_(before.updates_) {}
  virtual ~Training() = default;

  std::int64_t updates() const { return updates_; }
  void watch_updates() {
    optimizer_->after_step = [this] {
      ++updates_;
      note_update();
      ends_ = survivors().is_called();
      in_eval_ = !is_in_training_mode();
    };
  }
  void stop_watching_updates() {
    optimizer_->after_step = [] {};
  }
  void begin() {
    ending([&] { begin_training(); });
    survivors().doorway().watch_sigterm();
    watch_steps();
  }
  void end() {
    end_training();
    survivors().doorway().forget_sigterm();
  }
  void watch_steps() {
    in_eval_ = !is_in_training_mode();
    frontend::current().before_step = [this] {
      const bool is_evaluation = !c10::GradMode::is_enabled() || !(in_eval_ || is_in_training_mode());
      if (is_evaluation) return;  // which some ranks may make by themselves
      if (ends_ || look()) throw EpochOver();
    };
  }
  void go_on(bool is_lost) {
    const bool is_over = is_lost && (!frontend::has_current() || !session::is_of_loss(std::current_exception()));
    if (is_over || (is_lost && !survivors().may_go_on())) throw;
    ends_ = false;
    std::vector<session::Told> told;
    ending([&] { told = survivors().go_on(is_lost); });
    watch_steps();
    std::erase_if(told, [](const session::Told& each) { return each.progress < 0; });
    const bool is_again = std::ranges::adjacent_find(told, std::not_equal_to(), &session::Told::progress) == told.end();
    survivors().tell_going_on(is_again ? updates_ : updates_ - 1, is_again);
  }

  virtual session::Survivors& survivors() = 0;
  // True where ranks keep what others have not.
  virtual bool keeps_parts() const = 0;

 protected:
  virtual void begin_training() = 0;
  virtual void end_training() = 0;
  virtual void note_update() = 0;
  virtual bool look() { return false; }  // before a step of the training: true where the epoch is to end

  Value own_state() const { return options_.state ? options_.state() : Value(); }
  void take_own(std::int64_t updates, const Value& state) {
    updates_ = updates;
    if (options_.take) options_.take(state);
  }

  const std::shared_ptr<JobOptimizer> optimizer_;
  const RunOptions options_;

 private:
  // A rank that leaves in order ends as a program that calls std::exit().
  static void ending(const std::function<void()>& call) {
    try {
      call();
    } catch (const session::ProcessEnds& ends) {
      std::exit(ends.code);
    }
  }

  std::int64_t updates_ = 0;
  bool ends_ = false;     // the epoch, for ranks join or leave
  bool in_eval_ = false;  // no module is in training mode while it trains
};

// Tells the engine of trainings of both kinds.
template <class Face>
class Run::Loop : public Run::Training, public Face {
 public:
  using Training::Training;
  explicit Loop(const Training& before) : Training(before) {}
  std::int64_t progress() const override { return updates(); }
  std::shared_ptr<session::Session> session() const override {
    return frontend::has_current() ? frontend::current().session : nullptr;
  }
  void end_saves(bool is_lost) override {
    auto& job = frontend::current();
    if (job.saves != nullptr) is_lost ? job.saves->drop() : job.saves->end();
  }
  Value word() const override { return {}; }
};

class Run::Copies : public Run::Loop<session::CopiesFace> {
 public:
  Copies(std::shared_ptr<JobOptimizer> optimizer, RunOptions options)
      : Loop(std::move(optimizer), std::move(options)),
        survivors_(*this, {.hooks = frontend::face_hooks, .facts = [this] { return facts_of(*optimizer_); }}) {}

  std::vector<std::pair<std::string, at::Tensor>> buffers() const override { return named(root()->named_buffers()); }
  void go_over(std::shared_ptr<session::Session> session) override {
    if (!own_) own_ = optimizer_->own();
    for (auto& parameter : root()->parameters()) parameter.mutable_grad().reset();
    frontend::go_over(std::move(session), std::nullopt, std::nullopt);
  }
  Value states() const override {
    value::List trained;  // a program may have frozen others since it began
    for (const auto& parameter : root()->parameters()) trained.items.emplace_back(parameter.requires_grad());
    return value::Tuple{{updates(), to_bytes(*own_), own_state(), trained}};
  }
  void take(const Value* states) override {
    if (states != nullptr) {
      const auto& items = states->as<value::Tuple>().items;
      own_ = from_bytes(items.at(1).as<std::string>());
      take_own(items.at(0).as<std::int64_t>(), items.at(2));
      auto trained = items.at(3).as<value::List>().items.begin();
      for (auto& parameter : root()->parameters()) parameter.set_requires_grad((trained++)->as<bool>());
    }
    optimizer_->load(*own_);
    optimizer_->lent.count_anew();
    own_.reset();
  }

  session::Survivors& survivors() override { return survivors_; }
  bool keeps_parts() const override { return false; }

 protected:
  void begin_training() override { survivors_.begin(); }
  void end_training() override { survivors_.close_door(); }
  void note_update() override { survivors_.keep(); }

 private:
  std::optional<JobOptimizer::Own> own_;  // state of the optimizer, while it goes over
  session::CopySurvivors survivors_;
};

class Run::Parts : public Run::Loop<session::PartsFace> {
 public:
  Parts(std::shared_ptr<JobOptimizer> optimizer, RunOptions options)
      : Loop(std::move(optimizer), std::move(options)),
        survivors_(*this, of_survivors(), options_.keep_every, layouts_of(options_)) {}
  explicit Parts(const Training& before)
      : Loop(before), survivors_(*this, of_survivors(), options_.keep_every, layouts_of(options_)) {}
  void succeed(Training& before) { survivors_.succeed(before.survivors()); }

  std::unique_ptr<job_checkpoint::JobAccess> lend() override { return frontend::current().lend(); }
  session::ChangingJob told() const override { return frontend::told_of(frontend::current()); }
  Value state() const override { return value::Tuple{{updates(), own_state()}}; }
  void take(const Value& state) override {
    const auto& items = state.as<value::Tuple>().items;
    take_own(items.at(0).as<std::int64_t>(), items.at(1));
  }
  void go_over(std::shared_ptr<session::Session> session,
               const std::function<job_checkpoint::HeldJob()>& hold) override {
    frontend::current().model->zero_grad(/*set_to_none=*/true);
    hold ? frontend::go_back(std::move(session), hold)
         : frontend::go_over(std::move(session), std::nullopt, std::nullopt);
  }

  session::Survivors& survivors() override { return survivors_; }
  bool keeps_parts() const override { return true; }

 protected:
  void begin_training() override {
    if (survivors_.begin() || !frontend::current().model->partitioned()) return;
    survivors_.keep_everywhere();
  }
  void end_training() override { survivors_.end(); }
  void note_update() override { survivors_.note_update(); }
  bool look() override {
    if (!frontend::current().model->partitioned()) return false;
    share_trace();
    if (survivors_.is_due()) survivors_.keep();
    return survivors_.is_called();
  }

 private:
  session::SurvivorOptions of_survivors() {
    return {.hooks = frontend::face_hooks, .facts = [this] { return facts_of(*optimizer_); }};
  }

  // Gives all ranks, once in each session, the trace of the first one: any of them may be the first of the next.
  void share_trace() {
    const auto session = frontend::current().session;
    if (traced_in_.lock() == session) return;
    traced_in_ = session;
    auto& model = *frontend::current().model;
    model.take_trace(messaging::made_by_first(
        session->mailbox(), session->members(topology::Group::kWorld), [&] { return model.lent_trace(); },
        session->patience()));
  }

  std::weak_ptr<session::Session> traced_in_;
  session::PartSurvivors survivors_;
};

Run::Run(RunOptions options) {
  auto optimizer = checked_optimizer(options);
  if (session::why_no_survivors(*frontend::current().session).empty()) {
    training_ = std::make_unique<Copies>(std::move(optimizer), std::move(options));
  } else {
    training_ = std::make_unique<Parts>(std::move(optimizer), std::move(options));
  }
  training_->watch_updates();
}
Run::~Run() {
  training_->stop_watching_updates();
  stop_watching();
}

std::int64_t Run::updates() const { return training_->updates(); }
void Run::begin() {
  training_->begin();
  frontend::current().open_after = [this](config::Config config) { return open_after(std::move(config)); };
}
void Run::end() {
  training_->end();
  stop_watching();
}
void Run::stop_watching() {
  if (!frontend::has_current()) return;
  frontend::current().before_step = [] {};
  frontend::current().open_after = {};
}

// In a layout with parts copies become ranks that keep these.
std::shared_ptr<session::Session> Run::open_after(config::Config config) {
  const bool stays = training_->keeps_parts() || session::key_of_parts(config).empty();
  if (stays) return training_->survivors().open_after(std::move(config));
  auto parts = std::make_unique<Parts>(*training_);
  auto session = parts->survivors().open_after(std::move(config));
  parts->succeed(*training_);
  training_ = std::move(parts);
  training_->watch_updates();
  training_->watch_steps();
  return session;
}

void Run::go_on() { training_->go_on(/*is_lost=*/true); }
void Run::go_on_with_others() { training_->go_on(/*is_lost=*/false); }

}  // namespace lamina
