// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/change.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/frontend/checkpointed_job.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/layout_change.h"
#include "lamina/frontend/model.h"
#include "lamina/job_checkpoint/held_job.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/job_checkpoint/saves.h"
#include "lamina/job_checkpoint/together.h"
#include "lamina/session/change.h"

namespace lamina {
namespace {

using frontend::CheckpointedJob;
using frontend::Current;

bool is_whole(const Current& job) {
  const auto optimizers = frontend::optimizers_of(job);
  return job.model->is_whole() && std::ranges::all_of(optimizers, [](const auto& each) { return each->is_whole(); });
}

// The other layout's plan, while this one is whole. Collective over the world.
model::Proposal proposal_in(Current& job, const config::Config& config) {
  model::Proposal proposal;
  job_checkpoint::together(job.lend()->peers(), [&] {
    try {
      proposal = job.model->propose_in(config);
    } catch (const std::exception& wrong) {
      throw session::refused_change(wrong.what());
    }
  });
  return proposal;
}

// Ends the current job, and begins one of that session. `is_held`: values and states, which are kept elsewhere.
Current& begin_changed(std::shared_ptr<session::Session> session, bool is_held) {
  auto& job = frontend::current();
  const auto optimizers = frontend::optimizers_of(job);
  job.model->let_go();
  for (const auto& optimizer : optimizers) optimizer->let_go(/*with_states=*/!is_held);
  if (is_held && job.model->partitioned()) session::put_aside(job.model->table(), job.model->sharding());
  auto& changed = frontend::go_over(std::move(session));
  changed.model = std::make_shared<frontend::Model>(*changed.held->now, changed);
  changed.held->now = changed.model;
  for (const auto& optimizer : optimizers) frontend::JobOptimizer::join(optimizer, changed);
  return changed;
}

// The model and the optimizers wait for what is held.
void wait_for(const job_checkpoint::HeldJob& held, Current& job) {
  job.waiting = job_checkpoint::resumption_of(held, std::make_shared<CheckpointedJob>(job));
}

}  // namespace

session::ChangingJob frontend::told_of(const Current& job) {
  session::ChangingJob told;
  told.saves = job.saves != nullptr && job.saves->are_under_way();
  told.relies = job.relies;
  told.waits = job.waiting != nullptr;
  if (job.model == nullptr) return told;
  job.model->tell(told);
  for (const auto& optimizer : frontend::optimizers_of(job)) told.optimizers.push_back(optimizer->told());
  return told;
}

void frontend::go_over(std::shared_ptr<session::Session> session, std::optional<model::Proposal> proposal,
                       const std::optional<job_checkpoint::HeldJob>& held) {
  const auto waiting = frontend::current().waiting;
  auto& changed = begin_changed(std::move(session), held.has_value());
  if (held) {
    wait_for(*held, changed);
    changed.waiting->keep_options();  // they are the very ones
  } else if (waiting != nullptr) {
    changed.waiting = waiting->for_job(std::make_shared<CheckpointedJob>(changed));
  }
  changed.model->go_on(std::move(proposal));
}

void frontend::go_back(std::shared_ptr<session::Session> session,
                       const std::function<job_checkpoint::HeldJob()>& hold) {
  auto& changed = begin_changed(std::move(session), /*is_held=*/true);
  wait_for(hold(), changed);
  const auto waiting = changed.waiting;
  model::Proposal proposal;
  try {
    proposal = changed.model->propose_in(changed.session->config(), waiting->partition());
  } catch (const std::exception& wrong) {
    proposal.error = wrong.what();
  }
  changed.model->go_on(std::move(proposal));
  waiting->go_on();
  for (const auto& optimizer : frontend::optimizers_of(changed)) optimizer->lent.count_anew();  // newcomers loaded less
}

void change(Settings settings) { change(frontend::to_json(settings)); }

void change(const std::string& json) {
  auto& job = frontend::outside_step("lamina.change()");
  auto& session = *job.session;
  const auto config = session::changed_config(session, json);
  session::require_changeable(session, config, frontend::told_of(job));
  if (job.saves != nullptr) job.saves->end();
  const bool is_cut = job.model->partitioned();
  const bool waits = !is_cut || session::waits_for_trace(session, config, job.model->has_trace(), is_whole(job));
  std::optional<model::Proposal> proposal;
  if (!waits) proposal = proposal_in(job, config);
  std::optional<job_checkpoint::HeldJob> held;
  if (is_cut) {
    CheckpointedJob lent(job);
    job_checkpoint::require_changeable(lent);
    held = job_checkpoint::hold_job(lent);
  }
  if (waits) held.reset();  // each rank goes on with what it has
  auto next = job.open_after ? job.open_after(config) : session::open_after(session, config, frontend::face_hooks());
  frontend::go_over(std::move(next), std::move(proposal), held);
}

}  // namespace lamina
