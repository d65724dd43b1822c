// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_outputs.h"

#include <stdlib.h>

#include <filesystem>

#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/options/file_pattern.h"

namespace lamina::launch {
namespace {

std::optional<FilePattern> pattern(const std::optional<std::string>& text, const char* option) {
  return text ? std::optional(FilePattern(*text, option)) : std::nullopt;
}

}  // namespace

RankOutputs::RankOutputs(const Preparation& job) : base_rank_(job.layout.base_rank), places_(1) {
  const auto out = pattern(job.options.output_pattern, "--stdout");
  const auto err = pattern(job.options.error_pattern, "--stderr");
  const std::int64_t limit = std::int64_t{job.options.log_limit_mib} << 20;
  for (int i = 1; i < job.layout.processes; ++i) {
    const std::string out_name = out ? out->name(job.layout, i) : "";
    const std::string err_name = err ? err->name(job.layout, i) : "";
    Place place{.out = add(out ? RankLog(out_name) : RankLog(limit))};
    place.err = out_name == err_name ? place.out : add(err ? RankLog(err_name) : RankLog(limit));
    places_.push_back(place);
  }
}

RankLog* RankOutputs::add(RankLog log) { return &logs_.emplace_back(std::move(log)); }

void RankOutputs::begin_here() {
  for (RankLog& log : logs_) log.begin_here();
}

bool RankOutputs::has(base::Rank rank) const {
  const auto local = rank.value - base_rank_;
  return local > 0 && local < static_cast<std::int64_t>(places_.size());
}

std::string RankOutputs::tail(base::Rank rank, int lines) const {
  const Place& place = places_[rank.value - base_rank_];
  const std::string errors = place.err->tail(lines);
  return errors.empty() ? place.out->tail(lines) : errors;
}

std::optional<std::string> RankOutputs::trouble() {
  if (told_) return {};
  for (const RankLog& log : logs_) {
    if (log.trouble().empty()) continue;
    told_ = true;
    return base::str("what ranks write cannot be kept in ", log.place(), ": ", log.trouble(), "; the last ",
                     RankLog::kRemembered / 1024, " KiB of each rank are kept in memory");
  }
  return {};
}

RankOutputs::Kept RankOutputs::keep() const {
  const char* variable = ::getenv("TMPDIR");
  std::string folder = base::str(variable && *variable ? variable : "/tmp", "/lamina-failed-XXXXXX");
  Kept kept;
  const auto keep_one = [&](const RankLog& log, std::size_t i, const char* kind) {
    if (log.named() || log.empty()) return;
    if (kept.folder.empty() && ::mkdtemp(folder.data()) == nullptr) {
      kept.trouble = base::str(std::filesystem::path(folder).parent_path().string(), ": ", base::system_error());
      return;
    }
    kept.folder = folder;
    const auto wrong = log.keep_as(base::str(folder, "/rank", base_rank_ + static_cast<int>(i), ".", kind));
    if (!wrong.empty()) kept.trouble = wrong;
  };
  for (std::size_t i = 1; i < places_.size() && (kept.trouble.empty() || !kept.folder.empty()); ++i) {
    const Place& place = places_[i];
    const bool one = place.out == place.err;
    keep_one(*place.out, i, one ? "log" : "stdout");
    if (!one) keep_one(*place.err, i, "stderr");
  }
  return kept;
}

}  // namespace lamina::launch
