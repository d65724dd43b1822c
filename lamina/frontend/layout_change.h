// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "lamina/frontend/current.h"
#include "lamina/job_checkpoint/held_job.h"
#include "lamina/model/cut.h"
#include "lamina/session/change.h"
#include "lamina/session/session.h"

namespace lamina::frontend {

// Ends the current job, and begins one with that session, which was opened beside its own: with the same model and
// optimizers, cut by that plan, if any. Values and states come from what ranks hold of them, or are whole here.
// Collective over the world; an error ends the job.
void go_over(std::shared_ptr<session::Session> session, std::optional<model::Proposal> proposal,
             const std::optional<job_checkpoint::HeldJob>& held);

// Does so after a loss, or with others, in the layout of that session: values, states and options go back to what
// `hold` then gives, of what ranks have kept. Collective over the world; an error ends the job.
void go_back(std::shared_ptr<session::Session> session, const std::function<job_checkpoint::HeldJob()>& hold);

// Tells what the face knows of a job that is to go over to another layout.
session::ChangingJob told_of(const Current& job);

}  // namespace lamina::frontend
