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
#include "lamina/environment/environment.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/value/bytes.h"

namespace lamina::session {
namespace {

constexpr std::size_t kPlate = 128;       // bytes of the file
constexpr std::size_t kMostWord = 16384;  // a place has configurations
constexpr auto kMachine = "machine";
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

Facts of_guest(int node, Facts facts) {
  facts.emplace_back(kMachine, std::to_string(node));
  return facts;
}

int take_node(Facts& facts) {
  const auto node =
      facts.empty() || facts.back().first != kMachine ? std::nullopt : base::whole_number(facts.back().second);
  if (!node) throw base::FormatError("a newcomer does not tell its machine");
  facts.pop_back();
  return *node;
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

std::optional<DoorPlate> DoorPlate::of_environment() {
  const auto fd = base::whole_number(environment::process_environment()(environment::kDoorVariable).value_or(""));
  return fd && *fd >= 0 ? std::optional(DoorPlate(*fd)) : std::nullopt;
}

void DoorPlate::write(const std::string& address) const {
  std::array<char, kPlate> text{};
  std::copy_n(address.begin(), std::min(address.size(), kPlate - 1), text.begin());
  if (::pwrite(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size())) return;
  throw base::Error(base::str(environment::kDoorVariable, " cannot be written to: ", base::system_error()));
}

std::string DoorPlate::read() const {
  std::array<char, kPlate> text{};
  if (::pread(fd_, text.data(), text.size() - 1, 0) < 0) {
    throw base::ConfigError(base::str(environment::kDoorVariable, " cannot be read (", base::system_error(),
                                      "): it is for the launcher (`lamina run`) to set; unset it"));
  }
  return text.data();
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
