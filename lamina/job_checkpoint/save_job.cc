// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/save_job.h"

#include <optional>
#include <utility>

#include "lamina/job_checkpoint/contents.h"
#include "lamina/job_checkpoint/copies.h"
#include "lamina/job_checkpoint/generators.h"
#include "lamina/job_checkpoint/together.h"

namespace lamina::job_checkpoint {

std::shared_ptr<checkpoint::Save> save_job(JobAccess& job, Saves& saves, const SaveOptions& options) {
  saves.end();
  const auto peers = job.peers();
  checkpoint::SaveRequest request{.folder = options.folder, .tag = options.tag, .keep = options.keep};
  request.form = options.partial ? archive::Store::Form::kPartial : archive::Store::Form::kFull;
  if (job.has_model() && job.is_cut()) job.settle();
  std::optional<Contents> contents;
  together(peers, [&] {
    require_ready(job);
    contents.emplace(job, options.partial ? Contents::Of::kAll : Contents::Of::kModel).collect();
    if (options.partial) add_generators(job, contents->list());
  });
  require_same_copies(job);
  contents->hand_in();
  together(peers, [&] {
    if (peers.is_first()) {
      auto about = contents->describe();
      about.user_content = job.user_content();
      std::vector<at::Tensor> tensors;
      request.about = write_about(about, tensors, options.allow_objects);
      for (std::size_t i = 0; i < tensors.size(); ++i) contents->list().add_content(content_name(i), tensors[i]);
      request.texts = job.texts();
    }
    request.parts = contents->list().take();
  });
  auto save = saves.begin(peers, std::move(request), options.asynchronous);
  if (!options.asynchronous) saves.end();
  return save;
}

}  // namespace lamina::job_checkpoint
