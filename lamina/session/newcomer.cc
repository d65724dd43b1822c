// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/newcomer.h"

#include <poll.h>
#include <stdlib.h>  // setenv

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
#include "lamina/environment/environment.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/rendezvous/hello.h"
#include "lamina/session/change.h"

namespace lamina::session {
namespace {

using nlohmann::json;

constexpr auto kLooksAgain = std::chrono::milliseconds(50);
constexpr auto kDoorOpens = std::chrono::seconds(5);    // from a connection on
constexpr auto kDoorSilent = std::chrono::seconds(10);  // a door that says nothing for so long has gone
constexpr auto kAnswers = std::chrono::seconds(2);      // a launcher
constexpr auto kNobody = std::chrono::seconds(60);      // no launcher answers for so long: the job has gone
constexpr auto kRun = "TORCHELASTIC_RUN_ID", kRestart = "TORCHELASTIC_RESTART_COUNT";
constexpr std::size_t kMostFact = 12288;  // bytes of a text; a greeting takes 64 KiB

using environment::DoorPlate;
using environment::JobDoor;

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

// Has the environment name the job that this process joins.
void say_names(const NewPlace& place) {
  for (const auto& [name, value] : {std::pair{kRun, place.run}, {kRestart, place.restart}}) {
    value.empty() ? ::unsetenv(name) : ::setenv(name, value.c_str(), 1);
  }
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

void NewPlace::take_names() {
  const auto environment = environment::process_environment();
  run = environment(kRun).value_or("");
  restart = environment(kRestart).value_or("");
}

std::string NewPlace::text() const {
  return json{{"rank", rank},
              {"size", size},
              {"local", {local.rank, local.size}},
              {"host", host},
              {"port", port},
              {"epoch", epoch},
              {"config", config},
              {"asked", asked},
              {"clips_as_shards", clips_as_shards},
              {"run", {run, restart}},
              {"microbatches", microbatches}}
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
            .microbatches = told.at("microbatches").get<std::int64_t>(),
            .clips_as_shards = told.at("clips_as_shards").get<bool>(),
            .run = told.at("run").at(0).get<std::string>(),
            .restart = told.at("run").at(1).get<std::string>()};
  } catch (const json::exception&) {
    throw base::FormatError("what the job says of this newcomer's place cannot be read");
  }
}

Facts facts_of(const Session& session, const Facts& of_face) {
  const auto version = rendezvous::Hello::of_this_version();
  Facts facts{{"version of lamina", version.lamina},
              {"version of torch", version.torch},
              {"configuration", shortened(keys_of(session.config()))},
              {"--elastic", environment::process_environment()(environment::kElasticVariable).value_or("none")}};
  for (const auto& [name, text] : of_face) facts.emplace_back(name, shortened(text));
  return facts;
}

Newcomer::Newcomer(const Session& own, const Facts& of_face)
    : plate_(plate()),
      patience_(own.patience()),
      own_launcher_(environment::process_environment()(environment::kDoorkeeperVariable).value_or("")),
      terms_(environment::NewcomerTerms::read(environment::process_environment())),
      facts_(facts_of(own, of_face)),
      node_(own.world().node_rank),
      self_{.rank = base::Rank(1), .size = 2, .secret = secret(), .generation = "door", .told = {"", ""}} {}

// A line to the door at that address, if it opens. Throws base::ConfigError where another job's secret is there.
std::optional<DoorLine> Newcomer::come(const std::string& address) {
  using contact::Handshake;
  // One that has waited in vain does not wait for others once there is a place.
  const Entrant entrant{.node = node_, .together = no_place_ ? 0 : terms_.together};
  self_.told.front() = to_bytes(of_guest(entrant, facts_));
  const auto deadline = base::Deadline::after(kDoorOpens);
  Handshake handshake(self_, environment::Address::parse(address).begin_connect(), base::Rank(0), deadline);
  if (contact::finish(handshake, patience_.check_interrupt) == Handshake::State::kDone) {
    return DoorLine(handshake.take());
  }
  if (handshake.has_closed() || deadline.expired()) return std::nullopt;
  throw base::ConfigError(base::str("the job at ", address, " does not let this newcomer in: ", handshake.failure()),
                          base::Code{"elastic-newcomer"});
}

// Comes to the door that stands on the plate, else to one that a launcher of the job names. False: it is over.
bool Newcomer::look_for_door() {
  auto known = plate_.read();
  if (known.is_over) return false;
  if (!known.door.empty()) line_ = come(known.door);
  const auto launchers = known.launchers;
  for (auto each = launchers.begin(); !line_ && each != launchers.end(); ++each) {
    if (*each != own_launcher_ && !ask(*each, known)) return false;
  }
  if (line_) answered_ = base::Clock::now();
  return true;
}

// Comes to the door that this launcher names, and notes it on the plate. False: the job is over.
bool Newcomer::ask(const std::string& launcher, JobDoor& known) {
  has_launchers_ = true;
  JobDoor told;
  try {
    told = environment::ask_launcher(launcher, base::Deadline::after(kAnswers), patience_.check_interrupt);
  } catch (const base::PeerError&) {
    return true;
  }
  answered_ = base::Clock::now();
  if (told.is_over) return false;
  if (!told.door.empty() && told.door != known.door) line_ = come(told.door);
  const auto before = known.launchers.size();
  for (const auto& other : told.launchers) {
    if (std::ranges::find(known.launchers, other) == known.launchers.end()) known.launchers.push_back(other);
  }
  if (line_) known.door = told.door;
  if (line_ || known.launchers.size() > before) plate_.write(known);
  return true;
}

// The door says that this one waits, and why where there is no place for it.
void Newcomer::hear_why(const std::string& why) {
  const auto now = base::Clock::now();
  if (why.empty()) {
    no_place_.reset();
    return;
  }
  if (!no_place_) no_place_ = now;
  const auto wait = terms_.spare_wait;
  if (now - *no_place_ >= wait) {
    base::log_warning(
        base::str("this newcomer ends: it has had no place in the job for ", wait.count(), " s (--spare-wait): ", why));
    throw ProcessEnds{1};
  }
  if (why == told_) return;
  told_ = why;
  base::log_warning(base::str("this newcomer waits, for ", wait.count(), " s at most (--spare-wait): ", why));
}

void Newcomer::check_answers(Time now) const {
  if (now - heard_ >= patience_.timeout) {
    throw base::TimeoutError(
        "no rank of the job has answered this newcomer in time: raise timeout_s if a rank that is lost is found later",
        base::Code{"elastic-newcomer"});
  }
  if (!line_ && has_launchers_ && now - answered_ >= kNobody) {
    throw base::TimeoutError(base::str("no launcher of the job has answered this newcomer for ", kNobody.count(),
                                       " s: the job has ended, or its machines are not reached from here"),
                             base::Code{"elastic-newcomer"});
  }
}

std::optional<NewPlace> Newcomer::wait() {
  line_.reset();
  is_in_ = is_sent_away_ = false;
  heard_ = answered_ = base::Clock::now();
  while (true) {
    if (patience_.check_interrupt) patience_.check_interrupt();
    const auto now = base::Clock::now();
    check_answers(now);
    try {
      if (!line_ && !look_for_door()) return std::nullopt;
      if (!line_) {
        std::this_thread::sleep_for(has_launchers_ ? 4 * kLooksAgain : kLooksAgain);
        continue;
      }
      const auto word = line_->hear();
      if (!word) {
        if (now - answered_ >= kDoorSilent) throw base::PeerError("the door says nothing");
        line_->knock();
        pollfd ready{line_->fd(), POLLIN, 0};
        ::poll(&ready, 1, 4 * static_cast<int>(kLooksAgain.count()));
        continue;
      }
      heard_ = answered_ = now;
      const auto& [kind, text] = *word;
      if (kind == DoorWord::kPlace) return NewPlace::read(text);
      if (kind == DoorWord::kOver) return std::nullopt;
      if (kind == DoorWord::kRefused) {
        throw base::ConfigError(base::str("the job does not let this newcomer in: ", text),
                                base::Code{"elastic-newcomer"});
      }
      hear_why(text);
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
    is_sent_away_ = word->first == DoorWord::kAgain;
    if (is_sent_away_) throw base::PeerError("the ranks of the job agree anew on who goes on");
  }
}

// Waits until the others have decided whether that session begins. Where the door is lost meanwhile, this one goes on
// with those who may have.
bool Newcomer::is_let_in(Session& session) {
  std::optional<base::Deadline> lost;
  const auto deadline = base::Deadline::after(patience_.timeout);
  try {
    for (check_line(); !is_in_; check_line()) {
      if (patience_.check_interrupt) patience_.check_interrupt();
      if (deadline.expired() || (lost && lost->expired())) break;
      if (!lost && session.mailbox().loss(session.members(topology::Group::kWorld), {})) {
        lost = base::Deadline::after(kDoorSilent);
      }
      pollfd ready{line_->fd(), POLLIN, 0};
      ::poll(&ready, 1, static_cast<int>(kLooksAgain.count()));
    }
  } catch (const base::PeerError&) {
    return !is_sent_away_;
  }
  return true;
}

std::shared_ptr<Session> Newcomer::open(Session& own, const NewPlace& place, environment::World world,
                                        FaceHooks hooks) {
  say_names(place);  // its own launcher, if it is another one, has given it others
  auto config = config::parse_config({.json = place.config}).config;
  config.device = own.config().device;
  config.all_microbatches = place.microbatches;
  const auto meeting = std::make_shared<bool>(true);  // the hook stays with the session
  hooks.check_interrupt = [this, meeting, inner = std::move(hooks.check_interrupt)] {
    if (inner) inner();
    if (*meeting) check_line();
  };
  auto session = open_beside(own, std::move(config), std::move(world), std::move(hooks), {}, "");
  session->note_asked(config::parse_config({.json = place.asked}).config);
  if (place.clips_as_shards) session->clip_as_shards();
  *meeting = false;
  if (!is_let_in(*session)) {
    session->close(false);
    throw base::PeerError("the ranks of the job agree anew on who goes on");
  }
  return session;
}

}  // namespace lamina::session
