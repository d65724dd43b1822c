// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/checkpoint.h"

#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/frontend/checkpointed_job.h"
#include "lamina/job_checkpoint/resume_job.h"
#include "lamina/job_checkpoint/save_job.h"
#include "lamina/messaging/same_arguments.h"

namespace lamina {
namespace {

using frontend::CheckpointedJob;
using messaging::shown;

job_checkpoint::Saves& saves_of(frontend::Current& job) {
  if (job.saves == nullptr) job.saves = std::make_shared<job_checkpoint::Saves>();
  return *job.saves;
}

// Throws the same error on all ranks where they have given different arguments to `call`. Collective over the world.
void refuse_differing(session::Session& session, const char* call, const std::vector<messaging::Argument>& arguments) {
  const auto differences = messaging::differing_arguments(session.mailbox(), session.members(topology::Group::kWorld),
                                                          call, arguments, session.patience());
  if (!differences.empty()) {
    throw base::UsageError(base::str(call, ": ", differences), base::Code{"checkpoint-refused"});
  }
}

void require_same(session::Session& session, const std::filesystem::path& path, const std::string& tag,
                  const SaveOptions& options) {
  const auto kept = options.num_kept_partial_checkpoints;
  refuse_differing(session, "save_checkpoint()",
                   {{"path", path.string()},
                    {"tag", tag},
                    {"partial", shown(options.partial)},
                    {"num_kept_partial_checkpoints", kept ? std::to_string(*kept) : "none"},
                    {"asynchronous", shown(options.asynchronous)}});
}

void require_same(session::Session& session, const std::filesystem::path& path, const ResumeOptions& options) {
  refuse_differing(session, "resume_from_checkpoint()",
                   {{"path", path.string()},
                    {"tag", options.tag.value_or("none")},
                    {"partial", shown(options.partial)},
                    {"strict", shown(options.strict)},
                    {"load_optimizer", shown(options.load_optimizer)},
                    {"load_sharded_optimizer_state", shown(options.load_sharded_optimizer_state)},
                    {"verify", shown(options.verify)},
                    {"translate_function", options.translate_function ? "given" : "none"},
                    {"missing_ok", shown(options.missing_ok)}});
}

}  // namespace

bool CheckpointHandle::done() const { return save_->is_over(); }
void CheckpointHandle::wait() { save_->wait(); }

CheckpointHandle save_checkpoint(const std::filesystem::path& path, const std::string& tag,
                                 const SaveOptions& options) {
  auto& job = frontend::outside_step("save_checkpoint()");
  require_same(*job.session, path, tag, options);
  if (options.num_kept_partial_checkpoints.value_or(1) < 1) {
    throw base::UsageError("save_checkpoint(): num_kept_partial_checkpoints is at least 1, or none");
  }
  CheckpointedJob access(job, &options.user_content);
  job_checkpoint::SaveOptions request{.folder = path, .tag = tag, .partial = options.partial};
  request.keep = static_cast<std::size_t>(options.num_kept_partial_checkpoints.value_or(0));
  request.asynchronous = options.asynchronous;
  return CheckpointHandle(job_checkpoint::save_job(access, saves_of(job), request));
}

UserContent resume_from_checkpoint(const std::filesystem::path& path, const ResumeOptions& options) {
  auto& job = frontend::outside_step("resume_from_checkpoint()");
  require_same(*job.session, path, options);
  if (options.partial && options.translate_function) {
    throw base::UsageError("resume_from_checkpoint(): translate_function is for whole models: give partial = false");
  }
  const auto access = std::make_shared<CheckpointedJob>(job, nullptr, options.translate_function);
  job_checkpoint::resume_job(access, saves_of(job),
                             {.folder = path,
                              .tag = options.tag,
                              .partial = options.partial,
                              .strict = options.strict,
                              .load_optimizer = options.load_optimizer,
                              .load_sharded_optimizer_state = options.load_sharded_optimizer_state,
                              .verify = options.verify,
                              .translate = static_cast<bool>(options.translate_function),
                              .missing_ok = options.missing_ok});
  return access->take();
}

}  // namespace lamina
