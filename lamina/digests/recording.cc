// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/recording.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::digests {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;
constexpr std::array<std::string_view, static_cast<std::size_t>(kLastKind) + 1> kKinds{
    "input", "output", "output gradient", "result", "gradient", "parameter", "buffer", "state", "generator"};

// JSON has no numbers beyond the finite ones.
double number(const Json& json) {
  return json.is_null() ? std::numeric_limits<double>::infinity() : json.get<double>();
}

std::string quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

// Appends a number as JSON has it; it has none beyond the finite ones.
template <class Number>
  requires std::is_arithmetic_v<Number>
void append(std::string& line, Number number) {
  if constexpr (std::is_floating_point_v<Number>) {
    if (!std::isfinite(number)) {
      line.append("null");
      return;
    }
  }
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  line.append(text.data(), end);
}

template <class Numbers>
void append_list(std::string& line, const Numbers& numbers) {
  std::string_view before = "[";
  if (numbers.empty()) line.append("[");
  for (const auto number : numbers) append(line.append(std::exchange(before, ",")), number);
  line.append("]");
}

void append(std::string& line, const Digest& digest) {
  line.append("[").append(quoted(digest.dtype)).append(",");
  append_list(line, digest.shape);
  append(line.append(","), digest.begin);
  append(line.append(","), digest.elements);
  append(line.append(","), digest.squares);
  append_list(line.append(","), digest.projections);
  append(line.append(","), digest.not_finite);
  append(line.append(","), digest.largest);
  append(line.append(","), digest.small);
  append(line.append(","), digest.bits);
  line.append("]");
}

Json to_json(const Digest& digest) {
  std::string text;
  append(text, digest);
  return Json::parse(text);
}

Digest to_digest(const Json& json) {
  Digest digest{json.at(0), json.at(1), json.at(2),         json.at(3), number(json.at(4)),
                {},         json.at(6), number(json.at(7)), json.at(8), json.at(9)};
  for (int i = 0; i < kProjections; ++i) digest.projections[i] = number(json.at(5).at(i));
  return digest;
}

CallName to_call(const Json& line) {
  return {line.at("step"), line.at("microbatch"), line.at("name"), line.at("call")};
}

void take_reads(Reads& reads, const Json& json) {
  for (const auto& [name, read] : json.items()) {
    reads.values[name] = read.at("value");
    for (const auto& digest : read.at("tensors")) reads.tensors[name].push_back(to_digest(digest));
    if (const auto user = read.find("user"); user != read.end()) reads.users[name] = *user;
  }
}

void take(RankRecording& recording, const Json& line) {
  if (const auto kind = line.find("kind"); kind != line.end()) {
    const auto known = std::ranges::find(kKinds, kind->get<std::string>());
    if (known == kKinds.end()) throw base::FormatError(base::str("a tensor of kind ", kind->get<std::string>()));
    recording.seen.push_back({static_cast<Kind>(known - kKinds.begin()), line.at("step"), line.at("microbatch"),
                              line.at("name"), line.at("call"), line.at("index"), line.at("order"),
                              to_digest(line.at("digest"))});
  } else if (line.contains("modes")) {
    recording.calls[to_call(line)] = {line.at("modes"), line.at("generator"), line.at("drew")};
  } else if (const auto reads = line.find("reads"); reads != line.end()) {
    take_reads(recording.reads[to_call(line)], *reads);
  } else if (line.contains("steps")) {
    recording.steps = line.at("steps");
  } else if (line.contains("end")) {
    recording.ended = true;
  }
}

// Reads a rank's recording from a stream; `name` is for errors.
RankRecording read(std::istream& file, const std::string& name) {
  std::string text;
  RankRecording recording;
  int number = 0;
  while (std::getline(file, text) && !file.eof()) {  // a last line without an end was being written
    ++number;
    try {
      const Json line = Json::parse(text);
      if (number > 1) {
        take(recording, line);
        continue;
      }
      if (line.at("lamina recording") != kVersion) {
        throw base::FormatError(base::str("it is of version ", line.at("lamina recording").dump(),
                                          ", and this lamina reads version ", kVersion));
      }
      recording.rank = line.at("rank"), recording.world = line.at("world");
      recording.copy = line.at("copy"), recording.partition = line.at("partition");
      recording.slices = line.value("slices", std::int64_t{1});
      recording.about = line.at("about").get<std::map<std::string, std::string>>();
    } catch (const std::exception& error) {
      throw base::FormatError(
          base::str(name, ", line ", number, ": it cannot be read as a recording of a run: ", error.what()));
    }
  }
  if (number == 0) throw base::FormatError(base::str(name, ": the rank ended before its recording began"));
  return recording;
}

std::string file_of(const std::string& folder, std::int64_t rank) {
  return base::str(folder, "/rank-", rank, ".jsonl");
}

RankRecording read(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw base::Error(base::str("cannot read ", path.string(), ": ", base::system_error()));
  return read(file, path.string());
}

std::int64_t steps_in(const std::string& path) { return std::filesystem::exists(path) ? read(path).steps : 0; }

}  // namespace

RankRecording read_text(const std::string& text) {
  std::istringstream stream(text);
  return read(stream, "a recording in memory");
}

Writer::Writer(const std::string& folder, const RankRecording& about)
    : steps_before_(steps_in(file_of(folder, about.rank))),
      file_(file_of(folder, about.rank), std::ios::app),
      to_(file_) {
  if (!file_) throw base::Error(base::str("cannot record the run in ", folder, ": ", base::system_error()));
  begin(about);
}

Writer::Writer(std::ostream& to, const RankRecording& about) : to_(to) { begin(about); }

void Writer::begin(const RankRecording& about) {
  to_ << Json{{"lamina recording", kVersion}, {"rank", about.rank},     {"world", about.world}, {"copy", about.copy},
              {"partition", about.partition}, {"slices", about.slices}, {"about", about.about}}
      << std::endl;
}

// Writes a tensor without a tree of JSON: there are many.
void Writer::write(const Seen& seen) {
  std::string line = R"({"kind":")";
  line.append(kKinds[static_cast<std::size_t>(seen.kind)]).append(R"(","name":)").append(quoted(seen.name));
  const std::pair<std::string_view, std::int64_t> numbers[]{{"step", seen.step},
                                                            {"microbatch", seen.microbatch},
                                                            {"call", seen.call},
                                                            {"index", seen.index},
                                                            {"order", seen.order}};
  for (const auto& [name, number] : numbers) append(line.append(",\"").append(name).append("\":"), number);
  append(line.append(R"(,"digest":)"), seen.digest);
  to_ << line.append("}\n");
}

void Writer::write(const CallName& call, const Surroundings& surroundings) {
  const auto& [step, microbatch, name, number] = call;
  to_ << Json{{"step", step},
              {"microbatch", microbatch},
              {"name", name},
              {"call", number},
              {"modes", surroundings.modes},
              {"generator", surroundings.generator},
              {"drew", surroundings.drew}}
             .dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace)
      << '\n';
}

void Writer::write(const CallName& call, const Reads& reads) {
  const auto& [step, microbatch, name, number] = call;
  Json all = Json::object();
  for (const auto& [variable, value] : reads.values) {
    Json& read = all[variable] = {{"value", value}, {"tensors", Json::array()}};
    if (const auto user = reads.users.find(variable); user != reads.users.end()) read["user"] = user->second;
    const auto tensors = reads.tensors.find(variable);
    if (tensors == reads.tensors.end()) continue;
    for (const auto& digest : tensors->second) read["tensors"].push_back(to_json(digest));
  }
  to_ << Json{{"step", step}, {"microbatch", microbatch}, {"name", name}, {"call", number}, {"reads", all}}.dump(
             -1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace)
      << '\n';
}

void Writer::end_step(std::int64_t steps) { to_ << Json{{"steps", steps}} << std::endl; }

void Writer::end() { to_ << Json{{"end", true}} << std::endl; }

std::vector<RankRecording> read_run(const std::string& folder) {
  std::vector<RankRecording> ranks;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".jsonl") ranks.push_back(read(entry.path()));
  }
  if (error) throw base::Error(base::str("cannot read ", folder, ": ", error.message()));
  if (ranks.empty()) throw base::Error(base::str(folder, " has no recording of a run in it"));
  std::ranges::sort(ranks, {}, &RankRecording::rank);
  return ranks;
}

}  // namespace lamina::digests
