// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/tree_json.h"
#include "lamina/frontend/job_state.h"
#include "lamina/frontend/model.h"
#include "lamina/frontend/resumption.h"
#include "lamina/frontend/saves.h"
#include "lamina/messaging/same_arguments.h"

namespace lamina {
namespace {

using frontend::Current;
using frontend::Fields;
using frontend::JobOptimizer;
using value::Value;

frontend::Saves& saves_of(Current& job) {
  if (job.saves == nullptr) job.saves = std::make_shared<frontend::Saves>();
  return *job.saves;
}

archive::Store::Form form_of(bool partial) {
  return partial ? archive::Store::Form::kPartial : archive::Store::Form::kFull;
}

void require_ready(const Current& job, const SaveOptions& options) {
  const auto& model = frontend::require_model(job, "save_checkpoint()");
  if (options.num_kept_partial_checkpoints.value_or(1) < 1) {
    throw base::UsageError("save_checkpoint(): num_kept_partial_checkpoints is at least 1, or none");
  }
  if (!model.partitioned()) {
    throw base::UsageError(
        "save_checkpoint() before the model is partitioned, which its first step does: there is nothing yet that its "
        "initial values do not say",
        base::Code{"state-before-cut"});
  }
  if (model.accumulates()) {
    throw base::UsageError(
        "save_checkpoint() between the backward passes of one reduction (backward_passes_per_step): gradients that a "
        "checkpoint does not have would be lost. Save after the pass in which they are averaged",
        base::Code{"checkpoint-accumulates"});
  }
}

std::string now() {
  const auto time = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%FT%T+00:00", &parts);
  return text;
}

std::string shown(bool given) { return given ? "true" : "false"; }

// Throws the same error on all ranks where they have given different arguments to `call`. Collective over the world.
void refuse_differing(session::Session& session, const char* call, const std::vector<messaging::Argument>& arguments) {
  const auto differences = messaging::differing_arguments(session.mailbox(), session.members(topology::Group::kWorld),
                                                          call, arguments, session.patience());
  if (!differences.empty()) {
    throw base::UsageError(base::str(call, ": ", differences), base::Code{"checkpoint-refused"});
  }
}

void require_same(session::Session& session, const checkpoint::SaveRequest& request, const SaveOptions& options) {
  const auto kept = options.num_kept_partial_checkpoints;
  refuse_differing(session, "save_checkpoint()",
                   {{"path", request.folder.string()},
                    {"tag", request.tag},
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
                    {"translate_function", options.translate_function ? "given" : "none"}});
}

// Everything that this rank saves: parts, and the manifest's content.
class Everything {
 public:
  Everything(Current& job, const SaveOptions& options)
      : job_(job), options_(options), model_(*job.model), held_(*job.session, model_.table()), parts_(held_) {}

  void collect(checkpoint::SaveRequest& request) {
    add_model();
    std::vector<Value> optimizers;
    if (options_.partial) {
      for (const auto& optimizer : frontend::optimizers_of(job_)) {
        optimizers.push_back(add_optimizer(static_cast<int>(optimizers.size()), *optimizer));
      }
      add_generators();
    }
    tell("optimizers", value::List{std::move(optimizers)});
    tell_rest();
    if (is_first()) {
      for (std::size_t i = 0; i < tensors_.size(); ++i) parts_.add_content(session::content_name(i), tensors_[i]);
    }
    request.parts = parts_.take();
    request.about = std::move(about_);
  }

 private:
  bool is_first() const { return job_.session->world().rank == base::Rank(0); }
  void tell(const std::string& key, const Value& value) {
    about_[key] = checkpoint::to_json(value, tensors_, /*allow_objects=*/false);
  }

  void add_model() {
    for (auto& [names, tensor] : frontend::named_state(model_.tree())) {
      const auto* row = model_.table().find(tensor);
      if (!model_.table().is_here(*row)) continue;
      std::erase(names, row->layout.name);
      parts_.add_row(row->layout.name, model_.held_here(tensor), names);
    }
  }

  // Returns what is told of it.
  Value add_optimizer(int number, JobOptimizer& optimizer) {
    const auto& locals = optimizer.engine.parameters();
    auto options = optimizer.lent.options_of_groups();
    const auto named = optimizer.engine.states().state(optimizer.lent, distributed_optimizer::Extent::kPart);
    std::vector<Value> groups;
    for (const auto& group : optimizer.members()) {
      std::vector<std::string> names;
      for (const auto& [name, given, parameter, local] : group) {
        names.push_back(name);
        if (!local.defined()) continue;
        if (locals.is_master(local)) parts_.add_state(locals, {number, "", name}, local, local);
        if (const auto found = named.states.find(name); found != named.states.end()) {
          add_states(optimizer, {number, "", name}, local, frontend::to_fields(found->second));
        }
      }
      groups.push_back(described(options[groups.size()], names));
    }
    return value::Dict{{{"class", frontend::class_name(*optimizer.optimizer)},
                        {"groups", value::List{std::move(groups)}},
                        {"rest", value::Dict{}}}};
  }

  void add_states(const JobOptimizer& optimizer, session::StateName of, const at::Tensor& place, const Fields& fields) {
    for (const auto& [key, field] : fields) {
      of.state = key;
      if (field.isTensor()) {
        if (field.toTensor().defined()) parts_.add_state(optimizer.engine.parameters(), of, place, field.toTensor());
      } else if (field.isScalar()) {  // a number has a mark in its name
        of.state += frontend::kNumberMark;
        const auto type = field.isBool() ? at::kBool : field.isInt() ? at::kLong : at::kDouble;
        parts_.add_state(optimizer.engine.parameters(), of, place, at::scalar_tensor(field.toScalar(), type));
      } else if (!field.isNone()) {
        throw base::UsageError(base::str("the state ", key, " that the optimizer has of ", of.parameter, " is of type ",
                                         field.tagKind(), ": a checkpoint has tensors and numbers"),
                               base::Code{"checkpoint-cannot-save"});
      }
    }
  }

  static Value described(const Fields& options, const std::vector<std::string>& names) {
    c10::List<std::string> parameters;
    for (const auto& name : names) parameters.push_back(name);
    auto all = options;
    all["params"] = parameters;
    return frontend::value_of(all, "an option of an optimizer,");
  }

  void add_generators() {
    const auto rank = job_.session->world().rank;
    parts_.add_content(base::str("generator/", rank), at::detail::getDefaultCPUGenerator().get_state());
    const std::vector<Value> nothing_else(static_cast<std::size_t>(job_.session->world().size), value::Dict{});
    tell("generators", value::List{nothing_else});
  }

  void tell_rest() {
    tell("lamina", LAMINA_VERSION);
    tell("saved_at", now());
    tell("layout", frontend::layout_of(*job_.session));
    value::Dict partition;
    for (const auto& [name, number] : model_.partition()) {
      partition.items.emplace_back(name, static_cast<std::int64_t>(number));
    }
    tell("partition", partition);
    if (is_first()) tell("user_content", frontend::value_of(options_.user_content, "the user_content"));
    if (const auto steps = job_.session->job().seeds().steps()) {
      tell("seeded_steps", static_cast<std::int64_t>(*steps));
    }
    if (const auto scale = job_.loss_scale.lock(); scale != nullptr && scale->is_dynamic()) {
      const auto& state = scale->state();
      tell("loss_scale", value::Dict{{{"last_overflow", static_cast<std::int64_t>(state.last_overflow)},
                                      {"overflows_left", static_cast<std::int64_t>(state.overflows_left)},
                                      {"scale", state.scale},
                                      {"steps", static_cast<std::int64_t>(state.steps)}}});
    }
  }

  Current& job_;
  const SaveOptions& options_;
  const frontend::Model& model_;
  const session::CheckpointParts held_;
  session::PartsToSave parts_;
  nlohmann::json about_ = nlohmann::json::object();
  std::vector<at::Tensor> tensors_;
};

struct Opened {
  std::shared_ptr<session::CheckpointReader> reader;
  std::string tag;
};

// The checkpoint that world rank 0 finds of a tag, or the newest, on every rank. Collective.
Opened open(session::Session& session, const std::filesystem::path& path, const std::optional<std::string>& tag,
            const ResumeOptions& options) {
  std::optional<session::FoundCheckpoint> found;
  const auto tells = [](const std::string& line) { base::log_warning(line); };
  frontend::together(session, [&] {
    if (session.world().rank != base::Rank(0)) return;
    found = session::find_checkpoint(path, tag, form_of(options.partial), tells);
    if (found) return;
    throw base::UsageError(base::str("resume_from_checkpoint(): there is no checkpoint in ", path.string(),
                                     ": give the folder that save_checkpoint() got"),
                           base::Code{"checkpoint-not-there"});
  });
  Value word;
  if (found) word = value::Tuple{{found->folder.string(), found->id, found->tag}};
  const auto words = session.mailbox().all_gather(session.members(topology::Group::kWorld), word, session.patience());
  const auto& place = words.front().as<value::Tuple>().items;
  std::shared_ptr<session::CheckpointReader> reader;
  frontend::together(session, [&] {
    const auto& folder = place.at(0).as<std::string>();
    reader = std::make_shared<session::CheckpointReader>(folder, options.verify);
    if (reader->manifest().id == place.at(1).as<std::string>()) return;
    throw base::FormatError(base::str(folder, ": another checkpoint has taken this one's place meanwhile: load again"));
  });
  return {std::move(reader), place.at(2).as<std::string>()};
}

// The tag of the latest whole checkpoint before that one, on every rank; "" where there is none. Collective.
std::string before(session::Session& session, const std::filesystem::path& path, const std::string& tag) {
  std::string found;
  frontend::together(session, [&] {
    if (session.world().rank == base::Rank(0)) found = archive::Store(archive::file_system(), path).before(tag);
  });
  const auto words = session.mailbox().all_gather(session.members(topology::Group::kWorld), found, session.patience());
  return words.front().as<std::string>();
}

// The tensors of the model that are read, under all their names.
StateDict whole_state(const session::CheckpointReader& reader) {
  StateDict state;
  for (const auto& saved : reader.manifest().tensors) {
    if (saved.kind != archive::Kind::kParameter && saved.kind != archive::Kind::kBuffer) continue;
    const auto tensor = reader.whole(saved.name);
    state.emplace(saved.name, tensor);
    for (const auto& name : saved.also) state.emplace(name, tensor);
  }
  return state;
}

UserContent content_of(const session::CheckpointReader& reader) {
  const auto content = reader.about("user_content", /*allow_objects=*/false);
  if (content.get_if<value::None>() != nullptr) return {};
  if (const auto* dict = content.get_if<value::Dict>()) {
    const auto is_named = [](const auto& item) { return item.first.template get_if<std::string>() != nullptr; };
    if (std::ranges::all_of(dict->items, is_named)) return frontend::to_fields(content);
  }
  return {{"", frontend::to_ivalue(content)}};
}

UserContent load(Current& job, const std::shared_ptr<session::CheckpointReader>& reader, const ResumeOptions& options) {
  auto& session = *job.session;
  auto& model = *job.model;
  UserContent content;
  frontend::together(session, [&] { content = content_of(*reader); });
  const bool is_sharded = session.topology().size(topology::Group::kShard) > 1;
  const bool load_optimizer =
      options.partial && options.load_optimizer && (options.load_sharded_optimizer_state || !is_sharded);
  if (!options.partial && !frontend::optimizers_of(job).empty() && session.world().rank == base::Rank(0)) {
    base::log_warning("a whole model has no states of optimizers: those of this job stay as they are");
  }
  if (options.translate_function) {
    job.waiting.reset();
    StateDict state;
    frontend::together(session, [&] { state = options.translate_function(whole_state(*reader)); });
    frontend::together(session, [&] { model.load(state); });
    return content;
  }
  auto resumption = std::make_shared<frontend::Resumption>(job, reader, options.strict, load_optimizer);
  job.waiting.reset();
  if (options.partial) frontend::together(session, [&] { resumption->read_generator(); });
  if (model.partitioned()) {
    resumption->load();
  } else {
    frontend::WaitingCheckpoint waiting{.load = [resumption] { resumption->load(); }};
    // Damage is found here, where another one can be taken.
    frontend::together(session, [&] { reader->check_share(session); });
    frontend::together(session, [&] {
      resumption->check();
      waiting.partition = resumption->partition();
    });
    job.waiting = std::move(waiting);
  }
  if (options.partial) frontend::together(session, [&] { resumption->go_on(); });
  return content;
}

}  // namespace

bool CheckpointHandle::done() const { return save_->is_over(); }
void CheckpointHandle::wait() { save_->wait(); }

CheckpointHandle save_checkpoint(const std::filesystem::path& path, const std::string& tag,
                                 const SaveOptions& options) {
  auto& job = frontend::outside_step("save_checkpoint()");
  auto& saves = saves_of(job);
  saves.end();
  checkpoint::SaveRequest request{.folder = path, .tag = tag, .form = form_of(options.partial)};
  request.keep = static_cast<std::size_t>(options.num_kept_partial_checkpoints.value_or(0));
  require_same(*job.session, request, options);
  for (const auto& optimizer : frontend::optimizers_of(job)) optimizer->replace_new();
  frontend::together(*job.session, [&] {
    require_ready(job, options);
    Everything(job, options).collect(request);
  });
  auto save = saves.begin(*job.session, std::move(request), options.asynchronous);
  if (!options.asynchronous) saves.end();
  return CheckpointHandle(std::move(save));
}

UserContent resume_from_checkpoint(const std::filesystem::path& path, const ResumeOptions& options) {
  auto& job = frontend::outside_step("resume_from_checkpoint()");
  auto& session = *job.session;
  require_same(session, path, options);
  frontend::require_model(job, "resume_from_checkpoint()");
  if (options.partial && options.translate_function) {
    throw base::UsageError("resume_from_checkpoint(): translate_function is for whole models: give partial = false");
  }
  saves_of(job).end();
  for (auto tag = options.tag;;) {
    const auto opened = open(session, path, tag, options);
    try {
      return load(job, opened.reader, options);
    } catch (const base::Error& error) {
      const bool is_format = dynamic_cast<const base::FormatError*>(&error) != nullptr;
      const bool is_damage = is_format || dynamic_cast<const base::FileError*>(&error) != nullptr;
      if (!options.partial || !is_damage) throw;
      const auto older = before(session, path, opened.tag);
      if (older.empty() || (options.tag && !is_format)) throw;
      if (options.tag) throw base::FormatError(base::str(error.what(), "; the latest whole one before it is ", older));
      if (session.world().rank == base::Rank(0)) {
        base::log_warning(base::str(error.what(), ": the latest whole one before it, ", older, ", is taken"));
      }
      tag = older;
    }
  }
}

}  // namespace lamina
