// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/reader.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <set>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/chunks.h"
#include "lamina/checkpoint/part.h"
#include "lamina/checkpoint/tree_json.h"
#include "lamina/device/capabilities.h"
#include "lamina/foreign/model_folder.h"
#include "lamina/foreign/torch_file.h"
#include "lamina/value/dtype.h"

namespace lamina::job_checkpoint {
namespace {

using archive::Kind;

constexpr const char* kMixture =
    ": it was whole a moment before. What this job has is a mixture now: load it again, or another one, or begin anew";
constexpr std::size_t kShown = 10;  // names in an error

Kind alike(Kind kind) { return kind == Kind::kBuffer ? Kind::kParameter : kind; }

archive::Manifest manifest_at(const std::filesystem::path& place, std::optional<archive::Share> verify) {
  auto& files = archive::file_system();
  if (std::filesystem::is_regular_file(place)) return foreign::read_model_file(files, place, verify);
  if (foreign::is_smp_checkpoint(files, place)) return foreign::read_smp_checkpoint(files, place, verify);
  if (std::filesystem::exists(place / archive::kManifestName)) return archive::read_checkpoint(files, place);
  return foreign::read_model_folder(files, place, verify);
}

std::string listed(const std::vector<std::string>& names, std::size_t most) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), most); ++i) text += base::str(i == 0 ? "" : ", ", names[i]);
  return "[" + text + "]";
}

std::string_view dtype_name(at::ScalarType type) {
  const auto dtype = value::dtype_of(type);
  return dtype ? traits(*dtype).name : "another dtype";
}

void require_like(const archive::SavedTensor& saved, const std::string& name, const at::Tensor& tensor,
                  at::IntArrayRef sizes) {
  const auto type = checkpoint::scalar_type(saved.dtype);
  if (sizes != at::IntArrayRef(saved.shape)) {
    throw base::UsageError(
        base::str(name, " has the shape ", sizes, " here and ", at::IntArrayRef(saved.shape), " in the checkpoint"),
        base::Code{"checkpoint-shape"});
  }
  if (type != tensor.scalar_type() && !(at::isFloatingType(type) && tensor.is_floating_point())) {
    throw base::UsageError(base::str(name, " is of ", dtype_name(tensor.scalar_type()), " here and of ",
                                     traits(saved.dtype).name, " in the checkpoint"),
                           base::Code{"checkpoint-shape"});
  }
}

// Called between two reads: ends them where this rank is interrupted or another one is lost, and says about every
// second to whoever watches this process that it goes on.
std::function<void()> between_reads(const checkpoint::Peers& peers) {
  using Clock = base::Clock;
  return [&peers, said = Clock::now()]() mutable {
    if (peers.patience.check_interrupt) peers.patience.check_interrupt();
    if (const auto loss = peers.mailbox.first_loss()) {
      throw base::PeerError(base::str("resume_from_checkpoint(): ", loss->text()), *loss, base::Code{"group-lost"});
    }
    if (Clock::now() - said < std::chrono::seconds(1)) return;
    said = Clock::now();
    if (peers.alive) peers.alive();
  };
}

// A tensor that cannot be filled, which is to be known before others are.
void require_fillable(const std::string& name, const at::Tensor& into) {
  const bool repeats = at::has_internal_overlap(into) == at::MemOverlap::Yes;
  if (!repeats && !into.is_inference()) return;
  throw base::UsageError(
      base::str(name, repeats ? " has one element in several places (expand())" : " was made in inference mode",
                ", so that nothing can be loaded into it: make it a tensor of its own, by clone()"),
      base::Code{"checkpoint-shape"});
}

}  // namespace

std::optional<FoundCheckpoint> find_checkpoint(const std::filesystem::path& folder,
                                               const std::optional<std::string>& tag, archive::Store::Form form,
                                               const std::function<void(const std::string&)>& tells) {
  auto& files = archive::file_system();
  if (form == archive::Store::Form::kFull) {
    const auto place = tag ? folder / *tag : folder;
    std::error_code unknown;  // of what cannot be looked at, such as a link to itself
    const bool is_checkpoint = std::filesystem::exists(place / archive::kManifestName, unknown);
    if (is_checkpoint) return FoundCheckpoint{place, archive::read_checkpoint(files, place).id, ""};
    if (std::filesystem::is_regular_file(place, unknown) || foreign::is_model_folder(files, place))
      return FoundCheckpoint{place, "", ""};
  } else if (const auto place = foreign::find_smp_checkpoint(files, folder, tag);
             place && !std::filesystem::exists(*place / archive::kManifestName)) {
    return FoundCheckpoint{*place, "", place->filename().string()};
  }
  archive::Store store(files, folder, form);
  const auto found = tag ? std::optional(store.find(*tag)) : store.newest(tells);
  if (!found) return std::nullopt;
  return FoundCheckpoint{found->folder, found->manifest.id, found->tag};
}

Reader::Reader(const std::filesystem::path& place, bool verify, const archive::Share& share)
    : folder_(std::filesystem::is_regular_file(place) ? place.parent_path() : place),
      manifest_(manifest_at(place, verify ? std::optional(share) : std::nullopt)),
      files_(std::make_shared<archive::PieceReader>(archive::file_system(), folder_, manifest_, verify)),
      source_(files_) {
  list_tensors();
}

Reader::Reader(archive::Manifest manifest, std::shared_ptr<archive::PieceSource> source)
    : folder_("the memory of the ranks"), manifest_(std::move(manifest)), source_(std::move(source)) {
  list_tensors();
}

void Reader::list_tensors() {
  for (const auto& tensor : manifest_.tensors) {
    by_key_.emplace(Key{tensor.name, alike(tensor.kind), tensor.optimizer, tensor.state}, &tensor);
    for (const auto& name : tensor.also) {
      by_key_.emplace(Key{name, alike(tensor.kind), tensor.optimizer, tensor.state}, &tensor);
    }
  }
}

archive::PieceReader& Reader::files() const {
  base::internal_check(files_ != nullptr, "a file of what is in memory");
  return *files_;
}

const archive::SavedTensor* Reader::find(const std::string& name, Kind kind, int optimizer,
                                         const std::string& state) const {
  const auto found = by_key_.find(Key{name, alike(kind), optimizer, state});
  return found == by_key_.end() ? nullptr : found->second;
}

About Reader::about(const AboutWanted& wanted) const {
  const auto tensor = [this](std::size_t number) {
    const auto name = content_name(number);
    auto found = content(name);
    if (!found.defined()) throw base::FormatError(base::str(folder_.string(), ": ", name, " is missing"));
    return found;
  };
  return read_about(manifest_.about, tensor, wanted);
}

const std::string* Reader::saved_name(const std::vector<std::string>& names) const {
  const auto found =
      std::ranges::find_if(names, [this](const auto& name) { return find(name, Kind::kParameter) != nullptr; });
  return found == names.end() ? nullptr : &*found;
}

std::string Reader::check_model(const std::vector<NamesOf>& model, const ShapeOf& whole_shape, bool strict) const {
  std::set<std::string> known;
  std::vector<std::string> missing, unexpected;
  for (const auto& [names, tensor] : model) {
    known.insert(names.begin(), names.end());
    if (saved_name(names) == nullptr) missing.push_back(names.front());
  }
  for (const auto& saved : manifest().tensors) {
    const bool is_models = saved.kind == Kind::kParameter || saved.kind == Kind::kBuffer;
    if (is_models && !known.contains(saved.name)) unexpected.push_back(saved.name);
  }
  std::ranges::sort(unexpected);
  const bool fits = missing.empty() && unexpected.empty();
  if (strict && !fits) {
    throw base::UsageError(base::str("the checkpoint does not fit the model: missing ", listed(missing, kShown),
                                     ", unexpected ", listed(unexpected, kShown), "; strict=False loads what fits"),
                           base::Code{"checkpoint-names"});
  }
  for (const auto& [names, tensor] : model) {
    const auto* name = saved_name(names);
    if (name == nullptr) continue;
    require_like(*find(*name, Kind::kParameter), names.front(), tensor, whole_shape(tensor));
  }
  if (fits) return "";
  return base::str("resume_from_checkpoint(strict=False) left out: missing ", listed(missing, missing.size()),
                   ", unexpected ", listed(unexpected, unexpected.size()));
}

std::pair<Kind, int> Reader::best_source(const std::string& name, at::ScalarType dtype) const {
  const auto* saved = find(name, Kind::kParameter);
  base::internal_check(saved != nullptr, "a source of nothing");
  if (!at::isFloatingType(dtype) || dtype == checkpoint::scalar_type(saved->dtype)) return {Kind::kParameter, 0};
  const auto found = by_key_.lower_bound(Key{name, Kind::kMaster, 0, ""});  // of the first optimizer that has one
  if (found == by_key_.end()) return {Kind::kParameter, 0};
  const auto& [its_name, kind, optimizer, state] = found->first;
  return its_name == name && kind == Kind::kMaster ? std::pair(kind, optimizer) : std::pair(Kind::kParameter, 0);
}

void Reader::want_row(const Parts& parts, const std::string& name, Kind from, int optimizer, const at::Tensor& into) {
  const auto* row = parts.table().find(name);
  base::internal_check(row != nullptr, "a part of no row");
  require_fillable(name, into);
  model_.push_back(wanted(name, from, optimizer, "", parts.of_row(*row).region));
  model_.back().into = into;
}

void Reader::want_master(const Parts& parts, const StateName& of, const at::Tensor& into) {
  const bool has_master = find(of.parameter, Kind::kMaster, of.optimizer) != nullptr;
  if (!has_master && find(of.parameter, Kind::kParameter) == nullptr) return;
  const auto region = parts.of_local(into, of.parameter).region;
  optimizers_.push_back(has_master ? wanted(of.parameter, Kind::kMaster, of.optimizer, "", region)
                                   : wanted(of.parameter, Kind::kParameter, 0, "", region));
  optimizers_.back().into = into;
}

at::Tensor Reader::want_state(const Parts& parts, const LocalParameters& locals, const StateName& of,
                              const at::Tensor& local, const at::Tensor& held) {
  const auto* found = find(of.parameter, Kind::kState, of.optimizer, of.state);
  base::internal_check(found != nullptr, "a part of nothing");
  // A state like the parameter is here as what stands for that is.
  const auto* row = parts.table().find(of.parameter);
  const bool is_parts = row != nullptr && row->layout.shape == found->shape && !found->shape.empty();
  const auto sizes = is_parts && !locals.updates_whole(local) ? local.sizes() : at::IntArrayRef(found->shape);
  const auto where = parts.of_state(locals, local, of.parameter, sizes);
  auto wanted = this->wanted(of.parameter, Kind::kState, of.optimizer, found->state, where.region);
  if (held.defined() && held.sizes() == sizes && is_like(held, wanted)) {
    wanted.into = held;
    optimizers_.push_back(std::move(wanted));
    return held;
  }
  wanted_.push_back(std::move(wanted));
  wanted_.back().into = memory_for(wanted_.back());
  return wanted_.back().into.view(sizes);
}

at::Tensor Reader::content(const std::string& name) const {
  const auto* found = find(name, Kind::kContent);
  return found == nullptr ? at::Tensor() : all_of(*found);
}

value::Value Reader::tree(const std::string& name) const {
  const auto bytes = content(name);
  if (!bytes.defined()) return {};
  const auto* begin = static_cast<const char*>(bytes.data_ptr());
  const auto tensor = [&](std::size_t number) {
    auto found = content(base::str(name, "/", number));
    if (!found.defined()) throw base::FormatError(base::str(folder_.string(), ": a tensor of ", name, " is missing"));
    return found;
  };
  const auto json = nlohmann::json::parse(begin, begin + bytes.nbytes(), nullptr, /*allow_exceptions=*/false);
  return checkpoint::to_value(json, tensor, /*allow_objects=*/false);
}

std::map<std::string, at::Tensor> Reader::whole_model() const {
  std::map<std::string, at::Tensor> all;
  for (const auto& saved : manifest_.tensors) {
    if (saved.kind != Kind::kParameter && saved.kind != Kind::kBuffer) continue;
    const auto tensor = all.emplace(saved.name, all_of(saved)).first->second;
    for (const auto& name : saved.also) all.emplace(name, tensor);
  }
  return all;
}

void Reader::check_share(const checkpoint::Peers& peers) const {
  files().check(archive::Share{peers.index(), peers.world.size()}, between_reads(peers));
}

void Reader::read(const checkpoint::Peers& peers) {
  const auto went_on = between_reads(peers);
  read_places(wanted_, went_on);
  wanted_.clear();
  check_places(model_, went_on);
  check_places(optimizers_, went_on);
}

void Reader::fill_model(const checkpoint::Peers& peers) { fill(std::exchange(model_, {}), peers); }
void Reader::fill_optimizers(const checkpoint::Peers& peers) { fill(std::exchange(optimizers_, {}), peers); }

void Reader::read_places(const std::vector<Place>& places, const archive::PieceReader::WentOn& went_on) const {
  std::vector<archive::Wanted> wanted;
  for (const auto& each : places) wanted.push_back({each.tensor, each.region, checkpoint::bytes_of(each.into)});
  source_->read(wanted, went_on);
}

void Reader::check_places(const std::vector<Place>& places, const archive::PieceReader::WentOn& went_on) const {
  std::vector<archive::Wanted> wanted;
  for (const auto& each : places) wanted.push_back({each.tensor, each.region, {}});
  source_->check(wanted, went_on);
}

at::Tensor Reader::all_of(const archive::SavedTensor& tensor) const {
  auto into = at::empty(tensor.shape, checkpoint::scalar_type(tensor.dtype));
  files().read(tensor, 0, checkpoint::bytes_of(into));
  return into;
}

// Memory for what is wanted; padding is 0.
at::Tensor Reader::memory_for(const Place& place) {
  const auto type = checkpoint::scalar_type(place.tensor->dtype);
  const bool padded = place.region.size > checkpoint::count(place.region);
  return padded ? at::zeros({place.region.size}, type) : at::empty({place.region.size}, type);
}

// True where the bytes of the tensor are the file's.
bool Reader::is_like(const at::Tensor& tensor, const Place& place) {
  return devices::is_host(tensor) && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg() && tensor.scalar_type() == checkpoint::scalar_type(place.tensor->dtype) &&
         tensor.numel() == place.region.size && !tensor.is_inference();
}

void Reader::fill(std::vector<Place> places, const checkpoint::Peers& peers) const {
  constexpr std::size_t kMostStagedBytes = std::size_t{64} << 20;
  const at::NoGradGuard no_grad;
  const auto went_on = between_reads(peers);
  std::vector<Place> reads;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to a place, from memory that was read into
  std::size_t staged_bytes = 0;
  const auto read_staged = [&] {
    try {
      read_places(reads, went_on);
    } catch (const base::FormatError& error) {
      if (files_ == nullptr) throw;
      throw base::FormatError(base::str(error.what(), kMixture), base::Code{"checkpoint-damaged"});
    } catch (const base::FileError& error) {
      throw base::FileError(base::str(error.what(), kMixture), error.error_number());
    }
    for (const auto& [place, staged] : copies) place.copy_(staged.view(place.sizes()));
    reads.clear();
    copies.clear();
    staged_bytes = 0;
  };
  for (auto& each : places) {
    const auto place = each.into.detach();
    const bool is_direct = is_like(place, each);
    if (is_direct) {
      each.into = place.view({-1});
      place.unsafeGetTensorImpl()->bump_version();  // what autograd has saved of it is another value now
    } else {
      each.into = memory_for(each);
      copies.emplace_back(place, each.into);
      staged_bytes += each.into.nbytes();
    }
    reads.push_back(each);
    if (staged_bytes >= kMostStagedBytes && !source_->is_collective()) read_staged();
  }
  read_staged();
}

Reader::Place Reader::wanted(const std::string& name, Kind kind, int optimizer, const std::string& state,
                             layout::Region region) const {
  const auto* found = find(name, kind, optimizer, state);
  base::internal_check(found != nullptr, "a part of nothing");
  if (found->shape != region.whole) {
    throw base::UsageError(base::str(archive::describe(*found), " has another shape in ", folder_.string()));
  }
  return {.tensor = found, .region = std::move(region), .into = {}};
}

}  // namespace lamina::job_checkpoint
