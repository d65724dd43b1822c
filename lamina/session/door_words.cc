// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/door_words.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/base/whole_number.h"
#include "lamina/value/bytes.h"

namespace lamina::session {
namespace {

constexpr auto kMachine = "machine", kTogether = "together";
constexpr std::size_t kShown = 120;  // of a text that differs

// The line of it in which it first differs from the other one.
std::string shown(const std::string& text, const std::string& other) {
  auto at = static_cast<std::size_t>(std::mismatch(text.begin(), text.end(), other.begin(), other.end()).first -
                                     text.begin());
  if (at == text.size() && at < other.size() && other[at] == '\n') return "nothing more";
  if (at == other.size() && at < text.size() && text[at] == '\n') ++at;
  const auto line = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
  const auto begin = line == std::string::npos ? 0 : line + 1;
  const auto end = std::min(text.find('\n', at), text.size());
  return text.substr(begin, std::min(kShown, end - begin));
}

}  // namespace

std::string to_bytes(const Facts& facts) {
  value::Writer out;
  out.put<std::uint64_t>(facts.size());
  for (const auto& [name, text] : facts) {
    out.put_block(name);
    out.put_block(text);
  }
  return out.take();
}

Facts to_facts(const std::string& bytes) {
  value::Reader in(bytes);
  Facts facts;
  for (auto count = in.get_count(); count > 0; --count) {
    std::string name(in.get_block());
    facts.emplace_back(std::move(name), in.get_block());
  }
  in.expect_end();
  return facts;
}

Facts of_guest(const Entrant& entrant, Facts facts) {
  facts.emplace_back(kMachine, std::to_string(entrant.node));
  facts.emplace_back(kTogether, std::to_string(entrant.together));
  return facts;
}

Entrant take_entrant(Facts& facts) {
  const auto take = [&](const char* name) {
    const auto number =
        facts.empty() || facts.back().first != name ? std::nullopt : base::whole_number(facts.back().second);
    if (!number) throw base::FormatError(base::str("a newcomer does not tell its ", name));
    facts.pop_back();
    return *number;
  };
  const int together = take(kTogether);
  return {.node = take(kMachine), .together = together};
}

std::string difference(const Facts& job, const Facts& newcomer) {
  for (std::size_t i = 0; i < std::max(job.size(), newcomer.size()); ++i) {
    if (i >= job.size() || i >= newcomer.size() || job[i].first != newcomer[i].first)
      return "it tells other things of itself";
    const auto& [name, text] = job[i];
    const auto& its = newcomer[i].second;
    if (text != its)
      return base::str("its ", name, " is another one: ", shown(its, text), "; the job has ", shown(text, its));
  }
  return "";
}

bool DoorLine::say(DoorWord word, const std::string& text) { return line_.say(static_cast<char>(word) + text); }

bool DoorLine::knock() { return ::send(fd(), "k", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 || errno == EAGAIN; }

std::optional<std::size_t> DoorLine::hear_knocks() {
  std::array<char, 256> bytes;
  const auto count = ::recv(fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (count > 0) return static_cast<std::size_t>(count);
  return count < 0 && (errno == EAGAIN || errno == EINTR) ? std::optional<std::size_t>(0) : std::nullopt;
}

std::optional<std::pair<DoorWord, std::string>> DoorLine::hear() {
  const auto word = line_.hear();
  if (!word) return std::nullopt;
  if (word->empty()) throw base::PeerError("what the door says is no word");
  return std::pair(static_cast<DoorWord>(word->front()), word->substr(1));
}

}  // namespace lamina::session
