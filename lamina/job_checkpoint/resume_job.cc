// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/resume_job.h"

#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/job_checkpoint/generators.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/job_checkpoint/together.h"

namespace lamina::job_checkpoint {
namespace {

using value::Value;

// Returns, on every rank, what the first finds of a tag, or the newest; nothing where there is none and there need not
// be. Other ranks may have other working directories.
std::optional<FoundCheckpoint> found(const checkpoint::Peers& peers, const ResumeOptions& options,
                                     const std::optional<std::string>& tag) {
  const auto told = from_first(peers, [&]() -> Value {
    const auto form = options.partial ? archive::Store::Form::kPartial : archive::Store::Form::kFull;
    const auto tells = [](const std::string& line) { base::log_warning(line); };
    const auto place = find_checkpoint(std::filesystem::absolute(options.folder), tag, form, tells);
    if (place) return value::Tuple{{place->folder.string(), place->id, place->tag}};
    const auto none = base::str("there is no checkpoint in ", options.folder.string());
    if (options.missing_ok) {
      base::log_warning(base::str(none, ": nothing is loaded"));
      return value::Tuple{};
    }
    throw base::UsageError(
        base::str("resume_from_checkpoint(): ", none, ": give the folder that save_checkpoint() got"),
        base::Code{"checkpoint-not-there"});
  });
  const auto& words = told.as<value::Tuple>().items;
  if (words.empty()) return std::nullopt;
  return FoundCheckpoint{words.at(0).as<std::string>(), words.at(1).as<std::string>(), words.at(2).as<std::string>()};
}

// The tag of the latest whole checkpoint before that one, on every rank; "" where there is none.
std::string before(const checkpoint::Peers& peers, const ResumeOptions& options, const std::string& tag) {
  const auto find = [&]() -> Value { return archive::Store(archive::file_system(), options.folder).before(tag); };
  return from_first(peers, find).as<std::string>();
}

// A checkpoint that is open, of which nothing is in the job yet.
struct Opened {
  std::shared_ptr<Reader> reader;
  About about;
  std::optional<SavedGenerators> generators;
};

Opened open(JobAccess& job, const FoundCheckpoint& place, const ResumeOptions& options, OfOptimizers wanted) {
  const auto peers = job.peers();
  const archive::Share share{peers.index(), peers.world.size()};
  Opened opened{.reader = std::make_shared<Reader>(place.folder, options.verify, share)};
  if (opened.reader->manifest().id != place.id) {
    throw base::FormatError(
        base::str(place.folder.string(), ": another checkpoint has taken this one's place meanwhile: load again"));
  }
  const bool all = wanted == OfOptimizers::kAll;
  opened.about = opened.reader->about({.optimizers = all, .allow_objects = options.allow_objects});
  if (const auto& why = opened.about.no_optimizer; all && !why.empty()) {
    throw base::UsageError(base::str(why, "; without them (load_optimizer) the rest of it loads"),
                           base::Code{"checkpoint-optimizers"});
  }
  if (opened.about.form.empty()) {
    job.take_content(opened.about.user_content);
  } else {
    job.take_pickle(place.folder / "user_content.pt", opened.about.user_content);
  }
  if (options.partial) opened.generators.emplace(job, *opened.reader, opened.about);
  return opened;
}

void load(const std::shared_ptr<JobAccess>& job, const FoundCheckpoint& place, const ResumeOptions& options) {
  const auto peers = job->peers();
  const bool is_sharded = job->ranks().topology.size(topology::Group::kShard) > 1;
  const auto wanted = !options.partial || !options.load_optimizer           ? OfOptimizers::kNothing
                      : is_sharded && !options.load_sharded_optimizer_state ? OfOptimizers::kMasters
                                                                            : OfOptimizers::kAll;
  Opened opened;
  together(peers, [&] { opened = open(*job, place, options, wanted); });
  if (!options.partial && !job->optimizers().empty() && peers.is_first()) {
    base::log_warning("a whole model has no states of optimizers: those of this job stay as they are");
  }
  if (options.translate) {
    std::map<std::string, at::Tensor> state;
    together(peers, [&] { state = opened.reader->whole_model(); });
    job->wait_for_cut(nullptr);
    return job->load_translated(std::move(state));
  }
  const auto resumption =
      std::make_shared<Resumption>(job, opened.reader, std::move(opened.about), options.strict, wanted);
  if (job->is_cut()) {
    resumption->load();
  } else {
    together(peers, [&] {
      opened.reader->check_share(peers);  // Damage is found here, where another one can be taken.
      resumption->check();
    });
    resumption->load_options();
    job->wait_for_cut(resumption);
  }
  if (!options.partial) return;
  together(peers, [&] {
    resumption->go_on();
    opened.generators->set(*job);
  });
}

}  // namespace

void resume_job(const std::shared_ptr<JobAccess>& job, Saves& saves, const ResumeOptions& options) {
  require_model(job->has_model(), "resume_from_checkpoint()");
  saves.end();
  const auto peers = job->peers();
  for (auto tag = options.tag;;) {
    const auto place = found(peers, options, tag);
    if (!place) return;
    try {
      return load(job, *place, options);
    } catch (const base::Error& error) {
      const bool is_format = dynamic_cast<const base::FormatError*>(&error) != nullptr;
      const bool is_damage = is_format || dynamic_cast<const base::FileError*>(&error) != nullptr;
      if (!options.partial || !is_damage) throw;
      const auto older = before(peers, options, place->tag);
      if (older.empty() || (options.tag && !is_format)) throw;
      if (options.tag) {
        throw base::FormatError(base::str(error.what(), "; the latest whole one before it is '", older, "'"));
      }
      if (peers.is_first()) {
        base::log_warning(base::str(error.what(), ": the latest whole one before it, '", older, "', is taken"));
      }
      tag = older;
    }
  }
}

}  // namespace lamina::job_checkpoint
