// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/door_words.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "lamina/base/error.h"
#include "lamina/base/fork_guard.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"
#include "lamina/environment/environment.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/value/bytes.h"

namespace lamina::session {
namespace {

constexpr std::size_t kPlate = 128;  // bytes of the file
constexpr std::size_t kMostWord = 4096;
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

DoorLine::DoorLine(rendezvous::Connection connection) : connection_(std::move(connection)) {
  base::close_in_forked_children(fd());
}

DoorLine::~DoorLine() {
  if (connection_.socket) base::keep_in_forked_children(fd());
}

rendezvous::Mac DoorLine::sign(const rendezvous::Secret& key, std::int64_t number, std::string_view text) const {
  return rendezvous::authenticate(key, "door", {std::to_string(number), text});
}

bool DoorLine::say(DoorWord word, const std::string& text) {
  const auto body = static_cast<char>(word) + text.substr(0, kMostWord - 1);
  const auto mac = sign(connection_.outgoing, said_++, body);
  value::Writer out;
  out.put<std::uint32_t>(static_cast<std::uint32_t>(body.size()));
  const auto bytes = out.take() + std::string(mac.begin(), mac.end()) + body;
  return ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

bool DoorLine::knock() { return ::send(fd(), "k", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 || errno == EAGAIN; }

std::optional<std::size_t> DoorLine::hear_knocks() {
  std::array<char, 256> bytes;
  const auto count = ::recv(fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (count > 0) return static_cast<std::size_t>(count);
  return count < 0 && (errno == EAGAIN || errno == EINTR) ? std::optional<std::size_t>(0) : std::nullopt;
}

std::optional<std::pair<DoorWord, std::string>> DoorLine::hear() {
  constexpr std::size_t kHead = sizeof(std::uint32_t) + sizeof(rendezvous::Mac);
  while (true) {
    std::uint32_t size = 0;
    if (in_.size() >= kHead) std::memcpy(&size, in_.data(), sizeof size);
    if (in_.size() >= kHead && (size == 0 || size > kMostWord)) throw base::PeerError("what the door says is no word");
    const auto wanted = in_.size() < kHead ? kHead : kHead + size;
    if (in_.size() >= kHead && in_.size() == wanted) {
      rendezvous::Mac mac;
      std::memcpy(mac.data(), in_.data() + sizeof size, sizeof mac);
      auto body = in_.substr(kHead);
      in_.clear();
      if (!rendezvous::same(mac, sign(connection_.incoming, heard_++, body))) {
        throw base::PeerError("what the door says was changed");
      }
      return std::pair(static_cast<DoorWord>(body.front()), body.substr(1));
    }
    std::array<char, 512> bytes;
    const auto count = ::recv(fd(), bytes.data(), std::min(bytes.size(), wanted - in_.size()), MSG_DONTWAIT);
    if (count > 0) {
      in_.append(bytes.data(), static_cast<std::size_t>(count));
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      throw base::PeerError("the rank that lets newcomers in has gone");
    } else {
      return std::nullopt;
    }
  }
}

}  // namespace lamina::session
