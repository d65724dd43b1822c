// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/newcomer.h"

#include <poll.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/hex.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/config/config.h"
#include "lamina/environment/address.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/rendezvous/hello.h"
#include "lamina/session/change.h"

namespace lamina::session {
namespace {

using nlohmann::json;

constexpr auto kLooksAgain = std::chrono::milliseconds(50);
constexpr std::size_t kMostFact = 12288;  // bytes of a text; a greeting takes 64 KiB

DoorPlate plate() {
  auto plate = DoorPlate::of_environment();
  if (plate) return *plate;
  throw base::ConfigError(base::str(environment::kNewcomerVariable, " is set, and ", environment::kDoorVariable,
                                    " does not say where to join: it is for `lamina run --elastic` to set both"));
}

contact::Secret secret() {
  if (const auto inherited = contact::inherited_secret()) return *inherited;
  throw base::ConfigError("this process has no job secret from its launcher, so that it cannot join a job",
                          base::Code{"start-secret-missing"});
}

std::string shortened(const std::string& text) {
  if (text.size() <= kMostFact) return text;
  return base::str(text.substr(0, kMostFact), "... ", base::to_hex(contact::digest(text)));
}

// Its keys, but for the layout and what follows from that: one in a line.
std::string keys_of(const config::Config& config) {
  std::string lines;
  const auto keys = json::parse(config::to_json(config));
  for (const auto& [key, value] : keys.items()) {
    if (is_layout_key(key) || key == "verify_steps" || key == "sdp_gradient_clipping") continue;
    lines += base::str(key, " ", value.dump(), "\n");
  }
  return lines;
}

}  // namespace

LocalPlace local_place(const std::vector<int>& nodes, int rank) {
  const auto self = nodes.begin() + rank;
  return {.rank = static_cast<int>(std::count(nodes.begin(), self, *self)),
          .size = static_cast<int>(std::ranges::count(nodes, *self))};
}

std::string NewPlace::text() const {
  return json{{"rank", rank},     {"size", size},   {"local", {local.rank, local.size}},
              {"host", host},     {"port", port},   {"epoch", epoch},
              {"config", config}, {"asked", asked}, {"clips_as_shards", clips_as_shards}}
      .dump();
}

NewPlace NewPlace::read(const std::string& text) {
  try {
    const auto told = json::parse(text);
    return {.rank = told.at("rank").get<int>(),
            .size = told.at("size").get<int>(),
            .local = {told.at("local").at(0).get<int>(), told.at("local").at(1).get<int>()},
            .host = told.at("host").get<std::string>(),
            .port = told.at("port").get<int>(),
            .epoch = told.at("epoch").get<std::int64_t>(),
            .config = told.at("config").get<std::string>(),
            .asked = told.at("asked").get<std::string>(),
            .clips_as_shards = told.at("clips_as_shards").get<bool>()};
  } catch (const json::exception&) {
    throw base::FormatError("what the job says of this newcomer's place cannot be read");
  }
}

Facts facts_of(const Session& session, const Facts& of_face) {
  const auto version = rendezvous::Hello::of_this_version();
  Facts facts{{"version of lamina", version.lamina},
              {"version of torch", version.torch},
              {"configuration", shortened(keys_of(session.config()))}};
  for (const auto& [name, text] : of_face) facts.emplace_back(name, shortened(text));
  return facts;
}

Newcomer::Newcomer(const Session& own, const Facts& of_face)
    : plate_(plate()),
      patience_(own.patience()),
      self_{.rank = base::Rank(1),
            .size = 2,
            .secret = secret(),
            .generation = "door",
            .told = {to_bytes(of_guest(own.world().node_rank, facts_of(own, of_face))), ""}} {}

// A line to the door at that address, if it opens. Throws base::ConfigError where another job's secret is there.
std::optional<DoorLine> Newcomer::come(const std::string& address, const base::Deadline& deadline) {
  using contact::Handshake;
  Handshake handshake(self_, environment::Address::parse(address).begin_connect(), base::Rank(0), deadline);
  while (true) {
    const auto state = handshake.advance();
    if (state == Handshake::State::kDone) return DoorLine(handshake.take());
    if (state == Handshake::State::kFailed) {
      if (handshake.has_closed() || deadline.expired()) return std::nullopt;
      throw base::ConfigError(
          base::str("the job at ", address, " does not let this newcomer in: ", handshake.failure()),
          base::Code{"elastic-newcomer"});
    }
    pollfd ready{handshake.fd(), handshake.events(), 0};
    ::poll(&ready, 1, static_cast<int>(kLooksAgain.count()));
    if (patience_.check_interrupt) patience_.check_interrupt();
  }
}

std::optional<NewPlace> Newcomer::wait() {
  line_.reset();
  is_in_ = false;
  auto deadline = base::Deadline::after(patience_.timeout);
  while (true) {
    if (patience_.check_interrupt) patience_.check_interrupt();
    if (deadline.expired()) {
      throw base::TimeoutError(
          "no rank of the job has answered this newcomer in time: raise timeout_s if a rank that "
          "is lost is found later",
          base::Code{"elastic-newcomer"});
    }
    try {
      if (!line_) {
        const auto address = plate_.read();
        if (DoorPlate::is_over(address)) return std::nullopt;
        if (!address.empty()) line_ = come(address, deadline);
        if (!line_) {
          std::this_thread::sleep_for(kLooksAgain);
          continue;
        }
      }
      const auto word = line_->hear();
      if (!word) {
        line_->knock();
        pollfd ready{line_->fd(), POLLIN, 0};
        ::poll(&ready, 1, 4 * static_cast<int>(kLooksAgain.count()));
        continue;
      }
      deadline = base::Deadline::after(patience_.timeout);
      const auto& [kind, text] = *word;
      if (kind == DoorWord::kPlace) return NewPlace::read(text);
      if (kind == DoorWord::kOver) return std::nullopt;
      if (kind == DoorWord::kRefused) {
        throw base::ConfigError(base::str("the job does not let this newcomer in: ", text),
                                base::Code{"elastic-newcomer"});
      }
      if (!text.empty() && text != told_) base::log_warning(base::str("this newcomer waits: ", told_ = text));
    } catch (const base::PeerError&) {  // of the door: there will be another one, or the job ends
      line_.reset();
      std::this_thread::sleep_for(kLooksAgain);
    }
  }
}

// While the others meet.
void Newcomer::check_line() {
  while (!is_in_) {
    const auto word = line_->hear();
    if (!word) return;
    is_in_ = word->first == DoorWord::kIn;
  }
}

std::shared_ptr<Session> Newcomer::open(Session& own, const NewPlace& place, environment::World world,
                                        FaceHooks hooks) {
  auto config = config::parse_config({.json = place.config}).config;
  config.device = own.config().device;
  const auto meeting = std::make_shared<bool>(true);  // the hook stays with the session
  hooks.check_interrupt = [this, meeting, inner = std::move(hooks.check_interrupt)] {
    if (inner) inner();
    if (*meeting) check_line();
  };
  auto session = open_beside(own, std::move(config), std::move(world), std::move(hooks), {}, "");
  session->note_asked(config::parse_config({.json = place.asked}).config);
  if (place.clips_as_shards) session->clip_as_shards();
  *meeting = false;  // the line stays: its end would be this newcomer's to a door that has not met all yet
  return session;
}

}  // namespace lamina::session
