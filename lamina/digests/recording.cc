// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/recording.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/input_file.h"
#include "lamina/base/json_text.h"
#include "lamina/base/output_file.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::digests {
namespace {

using base::Json;

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

// Numbers beyond these are no run's, and a sum of some would overflow.
constexpr std::int64_t kMostRanks = 1 << 20, kMostCounted = std::int64_t{1} << 40,
                       kMostElements = std::int64_t{1} << 60;

std::int64_t whole(const Json& json, std::int64_t least, std::int64_t most, std::string_view what) {
  const bool fits =
      json.is_number_integer() && (!json.is_number_unsigned() || json.get<std::uint64_t>() <= kMostElements);
  const auto value = fits ? json.get<std::int64_t>() : least - 1;
  if (value < least || value > most) {
    const auto text =
        json.is_structured() ? std::string(json.type_name()) : json.dump(-1, ' ', true, Json::error_handler_t::replace);
    throw base::FormatError(
        base::str(what, ": ", text.substr(0, 60), " is not allowed; expected from ", least, " to ", most));
  }
  return value;
}
std::int64_t whole(const Json& line, const char* key, std::int64_t least, std::int64_t most) {
  return whole(line.at(key), least, most, key);
}

std::vector<std::int64_t> to_shape(const Json& json) {
  constexpr std::size_t kMostDimensions = 64;
  std::vector<std::int64_t> shape;
  std::int64_t elements = 1;
  if (!json.is_array() || json.size() > kMostDimensions) throw base::FormatError("shape: expected a list of sizes");
  for (const auto& size : json) {
    shape.push_back(whole(size, 0, kMostElements / std::max<std::int64_t>(elements, 1), "shape"));
    elements *= shape.back();
  }
  return shape;
}

Digest to_digest(const Json& json) {
  Digest digest{.dtype = json.at(0), .shape = to_shape(json.at(1))};
  digest.begin = whole(json.at(2), 0, kMostElements, "begin");
  digest.elements = whole(json.at(3), 0, kMostElements, "elements");
  digest.squares = number(json.at(4));
  for (int i = 0; i < kProjections; ++i) digest.projections[i] = number(json.at(5).at(i));
  digest.not_finite = whole(json.at(6), 0, digest.elements, "not finite");
  digest.largest = number(json.at(7));
  digest.small = whole(json.at(8), 0, digest.elements, "small");
  digest.bits = json.at(9);
  return digest;
}

CallName to_call(const Json& line) {
  return {whole(line, "step", -1, kMostCounted), whole(line, "microbatch", -1, kMostCounted), line.at("name"),
          whole(line, "call", -kMostCounted, kMostCounted)};
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
    const auto [step, microbatch, name, call] = to_call(line);
    recording.seen.push_back({static_cast<RecordedKind>(known - kKinds.begin()), step, microbatch, name, call,
                              whole(line, "index", 0, kMostCounted), whole(line, "order", 0, kMostCounted),
                              to_digest(line.at("digest"))});
  } else if (line.contains("modes")) {
    recording.calls[to_call(line)] = {line.at("modes"), line.at("generator"), line.at("drew")};
  } else if (const auto reads = line.find("reads"); reads != line.end()) {
    take_reads(recording.reads[to_call(line)], *reads);
  } else if (line.contains("steps")) {
    recording.steps = whole(line, "steps", 0, kMostCounted);
  } else if (line.contains("end")) {
    recording.ended = true;
  }
}

void begin(RankRecording& recording, const Json& line) {
  if (line.at("lamina recording") != kVersion) {
    throw base::FormatError(base::str("it is of version ", line.at("lamina recording").dump(),
                                      ", and this lamina reads version ", kVersion));
  }
  recording.world = whole(line, "world", 1, kMostRanks);
  recording.rank = whole(line, "rank", 0, recording.world - 1);
  recording.copy = whole(line, "copy", 0, kMostRanks);  // of a step's comparison in memory the world is one rank
  recording.partition = whole(line, "partition", 0, recording.world - 1);
  if (line.contains("slices")) recording.slices = whole(line, "slices", 1, recording.world);
  recording.about = line.at("about").get<std::map<std::string, std::string>>();
}

// Reads a rank's recording, of which `more` gives the next piece, "" at the end; `name` is for errors.
template <class More>
RankRecording read(const More& more, const std::string& name) {
  constexpr std::size_t kMostOfLine = std::size_t{16} << 20;
  RankRecording recording;
  int number = 0;
  std::string text;
  for (std::string piece = more(); !piece.empty(); piece = more()) {
    text += piece;
    std::size_t at = 0;
    for (auto end = text.find('\n'); end != std::string::npos; at = end + 1, end = text.find('\n', at)) {
      ++number;
      try {
        const Json line = base::parse_json(std::string_view(text).substr(at, end - at));
        number > 1 ? take(recording, line) : begin(recording, line);
      } catch (const std::exception& error) {
        throw base::FormatError(
            base::str(name, ", line ", number, ": it cannot be read as a recording of a run: ", error.what()));
      }
    }
    text.erase(0, at);  // what is left has no end yet; at the end of the file it was being written
    if (text.size() > kMostOfLine)
      throw base::FormatError(base::str(name, ", line ", number + 1, ": it has more than ", kMostOfLine, " bytes"));
  }
  if (number == 0) throw base::FormatError(base::str(name, ": the rank ended before its recording began"));
  return recording;
}

std::string file_of(const std::string& folder, std::int64_t rank) {
  return base::str(folder, "/rank-", rank, ".jsonl");
}

RankRecording read(const std::string& path) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  const std::string before = path + " ";
  const auto file = base::open_input(path, before);
  struct stat status{};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode))
    throw base::FormatError(before + "is no regular file, and no recording of a run");
  return read([&] { return base::read_input(file, before, kPiece); }, path);
}

std::int64_t steps_in(const base::Fd& file, const std::string& path) {
  struct stat status{};
  return ::fstat(file.get(), &status) == 0 && status.st_size > 0 ? read(path).steps : 0;
}

}  // namespace

RankRecording read_text(const std::string& text) {
  bool done = false;
  const auto more = [&] { return std::exchange(done, true) ? std::string() : text; };
  return read(more, "a recording in memory");
}

Writer::Writer(const std::string& folder, const RankRecording& about)
    : path_(file_of(folder, about.rank)),
      file_(base::open_output(path_, O_WRONLY | O_APPEND)),
      steps_before_(steps_in(file_, path_)) {
  begin(about);
  require_whole();
}

Writer::Writer(std::ostream& to, const RankRecording& about) : to_(&to) { begin(about); }

void Writer::begin(const RankRecording& about) {
  const Json line{{"lamina recording", kVersion}, {"rank", about.rank},           {"world", about.world},
                  {"copy", about.copy},           {"partition", about.partition}, {"slices", about.slices},
                  {"about", about.about}};
  add(line.dump() + "\n");
  empty();
}

void Writer::add(const std::string& line) {
  constexpr std::size_t kMostWaiting = std::size_t{64} << 10;
  if (to_ != nullptr) {
    *to_ << line;
    return;
  }
  waiting_ += line;
  if (waiting_.size() > kMostWaiting) empty();
}

// Keeps an error for the end of the step: it may be a thread of the backward that is here.
void Writer::empty() {
  const std::string text = std::exchange(waiting_, "");
  for (std::size_t done = 0; done < text.size() && failed_ == 0;) {
    const auto count = ::write(file_.get(), text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) failed_ = errno;
    if (count > 0) done += static_cast<std::size_t>(count);
  }
}

void Writer::require_whole() const {
  if (failed_ == 0) return;
  throw base::FileError(base::str("cannot record the run in ", path_, ": ", base::system_error(failed_)), failed_);
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
  add(line.append("}\n"));
}

void Writer::write(const CallName& call, const Surroundings& surroundings) {
  const auto& [step, microbatch, name, number] = call;
  const Json line{{"step", step},
                  {"microbatch", microbatch},
                  {"name", name},
                  {"call", number},
                  {"modes", surroundings.modes},
                  {"generator", surroundings.generator},
                  {"drew", surroundings.drew}};
  add(line.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) + '\n');
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
  const Json line{{"step", step}, {"microbatch", microbatch}, {"name", name}, {"call", number}, {"reads", all}};
  add(line.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) + '\n');
}

void Writer::end_step(std::int64_t steps) {
  add(Json{{"steps", steps}}.dump() + "\n");
  empty();
  require_whole();
}

void Writer::end() {
  add(Json{{"end", true}}.dump() + "\n");
  empty();
  require_whole();
}

std::vector<RankRecording> read_run(const std::string& folder) {
  std::vector<RankRecording> ranks;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".jsonl") ranks.push_back(read(entry.path().string()));
  }
  if (error) throw base::Error(base::str("cannot read ", folder, ": ", error.message()));
  if (ranks.empty()) throw base::Error(base::str(folder, " has no recording of a run in it"));
  std::ranges::sort(ranks, {}, &RankRecording::rank);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0 && ranks[i].rank == ranks[i - 1].rank)
      throw base::FormatError(base::str(folder, ": two recordings are of rank ", ranks[i].rank, "; remove one"));
    if (ranks[i].world != ranks.front().world)
      throw base::FormatError(base::str(folder, ": rank ", ranks[i].rank, " is of ", ranks[i].world, " ranks, rank ",
                                        ranks.front().rank, " of ", ranks.front().world, ": they are of two runs"));
  }
  return ranks;
}

}  // namespace lamina::digests
