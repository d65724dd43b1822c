// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/rank_outputs.h"

#include <stdlib.h>

#include <optional>

#include "lamina/base/str.h"
#include "lamina/launch/file_pattern.h"

namespace lamina::launch {
namespace {

std::optional<FilePattern> pattern(const std::optional<std::string>& text, const char* option) {
  return text ? std::optional(FilePattern(*text, option)) : std::nullopt;
}

}  // namespace

RankOutputs::RankOutputs(const Preparation& job) : base_rank_(job.layout.base_rank), places_(1) {
  const auto out = pattern(job.options.output_pattern, "--stdout");
  const auto err = pattern(job.options.error_pattern, "--stderr");
  for (int i = 1; i < job.layout.processes; ++i) {
    const std::string out_name = out ? out->name(job.layout, i) : "";
    const std::string err_name = err ? err->name(job.layout, i) : "";
    Place place{.out = add(out ? RankLog(out_name) : RankLog())};
    place.err = out_name == err_name ? place.out : add(err ? RankLog(err_name) : RankLog());
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

std::string RankOutputs::keep() const {
  const char* variable = ::getenv("TMPDIR");
  std::string folder = base::str(variable && *variable ? variable : "/tmp", "/lamina-failed-XXXXXX");
  bool made = false;
  for (std::size_t i = 1; i < places_.size(); ++i) {
    const Place& place = places_[i];
    for (const RankLog* log : {place.out, place.err}) {
      if (log->named() || log->empty()) continue;
      if (!made && ::mkdtemp(folder.data()) == nullptr) return {};
      made = true;
      const char* kind = place.out == place.err ? "log" : log == place.out ? "stdout" : "stderr";
      log->keep_as(base::str(folder, "/rank", base_rank_ + static_cast<int>(i), ".", kind));
    }
  }
  return made ? folder : "";
}

}  // namespace lamina::launch
