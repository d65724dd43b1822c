// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/part_survivors.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/messaging/agreement.h"
#include "lamina/session/next_layout.h"
#include "lamina/session/next_place.h"
#include "lamina/session/peers.h"

namespace lamina::session {
namespace {

using topology::Group;
using value::Tuple;
using value::Value;

constexpr int kChanges = 20;  // bits

// Hashes what this rank has of a model that is not cut.
std::int64_t hash_of_values(const job_checkpoint::JobAccess& job) {
  std::uint64_t hash = 0;
  for (const auto& [names, tensor] : job.model_state()) {
    if (tensor.is_meta()) continue;
    const auto values = devices::on_host(tensor.detach()).contiguous();
    hash = base::hash64({static_cast<const char*>(values.const_data_ptr()), values.nbytes()}, hash);
  }
  return static_cast<std::int64_t>(hash);
}

bool is_any_lost(Session& session) {
  return session.mailbox().loss(session.members(Group::kWorld), std::chrono::milliseconds(0)).has_value();
}

}  // namespace

PartSurvivors::Talk::Talk(std::shared_ptr<Session> its, Door* door)
    : session(std::move(its)), end(*session, door), epochs(epoch_of_environment()) {}

PartSurvivors::PartSurvivors(PartsFace& face, SurvivorOptions options, std::optional<std::int64_t> every,
                             std::vector<std::string> layouts)
    : Survivors(face, std::move(options)), face_(face), pace_(every), layouts_(std::move(layouts)) {
  note_update();
}

PartSurvivors::~PartSurvivors() = default;

std::optional<std::vector<Told>> PartSurvivors::begin() {
  note_update();
  doorway_.begin();
  std::optional<std::vector<Told>> told;
  if (environment::is_newcomer()) {
    states_.come();
    told = join();
  } else if (is_whole()) {
    const auto world = session_->members(Group::kWorld);
    is_alike_ = messaging::are_alike(session_->mailbox(), world, hash_of_values(*face_.lend()), session_->patience());
  }
  is_on_ = true;
  begin_epoch();
  return told;
}

void PartSurvivors::succeed(Survivors& before) {
  doorway_.take_over(before.doorway());
  is_on_ = has_succeeded_ = true;
}

void PartSurvivors::note_update() {
  session_ = face_.session();
  seeded_ = session_->job().seeds().steps();
  if (std::exchange(has_succeeded_, false)) begin_epoch();
}

bool PartSurvivors::is_whole() const {
  const bool has_slices = session_->config().tensor_parallel_degree > 1;  // from when the model was wrapped
  return states_.has_none() && !has_slices && session_->half_cut().empty() && !face_.told().is_cut;
}

std::shared_ptr<Session> PartSurvivors::open_after(config::Config config) {
  session_ = face_.session();
  if (face_.told().is_cut) keep_everywhere();
  return Survivors::open_after(std::move(config));
}

void PartSurvivors::end() {
  if (kept_.lock() == session_) states_.complete(peers_of(*session_));  // nothing is on its way to another training
  session_->mailbox().barrier(session_->members(Group::kWorld), session_->patience());
  is_on_ = false;
  close_door();
}

bool PartSurvivors::is_due() {
  if (!is_on_) return false;
  if (face_.session() != session_) note_update();  // the layout was changed since the last update
  const auto updates = face_.progress();
  if (listened_ != updates) listen();
  listened_ = updates;
  return kept_.lock() != session_ || pace_.is_due(updates) || (is_called_ && updates > pace_.newest());
}

bool PartSurvivors::listen() {
  if (!Doorway::is_open()) return false;
  hear_of_door(*session_);
  const auto own = Doorway::leaves() || (doorway_.has_waiting() && why_not_so_many(session_->world().size).empty());
  const auto world = session_->members(Group::kWorld);
  for (const auto& calls : session_->mailbox().all_gather(world, own, session_->patience())) {
    is_called_ = is_called_ || calls.as<bool>();
  }
  return is_called_;
}

std::string PartSurvivors::why_not_so_many(int ranks) const {
  auto told = face_.told();
  told.saves = told.waits = false;  // not any more by then
  try {
    next_layout(*session_, ranks, layouts_, told);
    return "";
  } catch (const base::Error& error) {
    return error.what();
  }
}

std::function<std::string(int)> PartSurvivors::why_not_so_many() {
  std::vector<std::string> why(1);
  const bool has_door = session_->world().rank == base::Rank(0);
  for (int ranks = 1; has_door && ranks <= doorway_.most(); ++ranks) why.push_back(why_not_so_many(ranks));
  return [why = std::move(why)](int ranks) { return why.at(static_cast<std::size_t>(ranks)); };
}

std::string PartSurvivors::way() const {
  auto way = base::str("parts of the model, kept ", pace_.text());
  for (const auto& layout : layouts_) way += "\n" + layout;
  return way;
}

void PartSurvivors::keep() {
  const auto now = base::Clock::now();
  if (kept_.lock() != session_) {
    const auto epoch = epoch_of_environment();
    changes_ = epoch == began_ ? changes_ + 1 : 0;
    began_ = epoch;
    kept_ = session_;
  }
  const auto updates = face_.progress();
  states_.keep(*face_.lend(), began_ << kChanges | changes_, updates, face_.state());
  pace_.note_kept(*session_, updates, now);
}

void PartSurvivors::keep_everywhere() {
  if (kept_.lock() != session_ || pace_.newest() != face_.progress()) keep();
  states_.complete(peers_of(*session_));
}

Survivors::Next PartSurvivors::meet(bool is_lost) {
  is_called_ = false;
  listened_ = -1;
  face_.end_saves(is_lost);
  bool leaves = false;
  try {
    leaves = !is_lost && leaves_in_order();
  } catch (const base::Error&) {  // then all go on without it, and whoever wants to leave does so after that
    if (!is_of_loss(std::current_exception())) throw;
    is_lost = true;
  }
  if (!talk_ || talk_->session != session_) {
    talk_.reset();
    talk_.emplace(session_, is_whole() ? nullptr : doorway_.door());  // newcomers would get values of nobody
  }
  auto told = face_.told();
  told.waits = false;  // what was to be loaded goes along, or is in the version that was kept
  for (auto& optimizer : told.optimizers) optimizer.waits = false;
  while (true) {
    leaves = leaves && !is_any_lost(*session_);
    const auto next = [&] {
      const FreePort port(*session_);
      const Value word =
          Tuple{{std::int64_t{port.number()}, states_.told(session_->mailbox()), face_.word(), is_whole()}};
      // The lowest rank that has anything leads.
      return talk_->end.next(word, states_.has_parts() || is_whole() ? 0 : -1, leaves);
    }();
    if (leaves && !talk_->end.may_leave(next)) continue;
    if (leaves) leave(next);
    std::vector<Value> kept;
    for (const auto& word : next.words) kept.push_back(word.as<Tuple>().items.at(1));
    goes_whole_ =
        std::ranges::all_of(next.words, [](const Value& word) { return word.as<Tuple>().items.at(3).as<bool>(); });
    goes_whole_ ? require_first_values(next) : states_.decide(kept);
    Next result;
    for (std::size_t place = 0; place < kept.size(); ++place) {
      const auto kept_then = [&] { return states_.is_new(kept[place]) ? -1 : states_.updates(); };
      result.told.push_back({.progress = goes_whole_ ? face_.progress() : kept_then(),
                             .word = next.words[place].as<Tuple>().items.at(2)});
    }
    const int size = session_->world().size;
    if (!is_lost && next.number == 1 && next.newcomers.empty() && std::ssize(next.members) == size) {
      return result;  // the newcomers have gone again
    }
    auto config = next_layout(*session_, next.size(), layouts_, told);
    const auto epoch = talk_->epochs + next.number;
    const auto port = next.words.front().as<Tuple>().items.at(0).as<std::int64_t>();
    auto world = next_place(*session_, next, static_cast<int>(port));
    take_place(world, epoch);
    try {
      result.session = talk_->end.open_in(next, std::move(config), std::move(world), epoch, options_.hooks());
    } catch (const base::PeerError&) {
      continue;  // they agree anew
    }
    note(next);
    result.told.resize(static_cast<std::size_t>(next.size()));
    return result;
  }
}

// Nobody is lost: all have what they keep for others, so that each may leave, but for one that takes something with it
// that only another one has that leaves, too.
bool PartSurvivors::leaves_in_order() {
  if (kept_.lock() != session_) return false;
  const auto peers = peers_of(*session_);
  states_.complete(peers);
  std::vector<Value> told;
  std::vector<bool> want;
  const Tuple own{{Doorway::leaves(), states_.told(session_->mailbox())}};
  for (const auto& each : peers.mailbox.all_gather(peers.world, own, peers.patience)) {
    want.push_back(each.as<Tuple>().items.at(0).as<bool>());
    told.push_back(each.as<Tuple>().items.at(1));
  }
  return states_.may_leave(told, want).at(peers.index());
}

// The values of a model that is not cut are those of the first rank.
void PartSurvivors::require_first_values(const NextEpoch& next) const {
  if (is_alike_ || std::ranges::find(next.members, base::Rank(0)) != next.members.end()) return;
  throw base::PeerError(
      "the first rank is lost before the first step, which gives all ranks its values of the model, and others had "
      "other "
      "values: make the model of the same random numbers on every rank, or start the job again",
      {}, base::Code{"elastic-lost"});
}

std::vector<Told> PartSurvivors::go_over(Next next) {
  if (goes_whole_) {
    switch_to(next.session, [&] { face_.go_over(next.session, {}); });
    talk_.reset();
    if (seeded_) session_->job().seeds().go_on_after(*seeded_);
    note_update();
    return std::move(next.told);
  }
  auto& session = *next.session;
  const auto hold = [&] {
    give_newcomers(next.told, session);
    return states_.hold(peers_of(session));
  };
  switch_to(next.session, [&] { face_.go_over(next.session, hold); });
  face_.take(states_.word());
  talk_.reset();
  note_update();
  pace_.go_on_from(face_.progress());
  keep();
  return std::move(next.told);
}

// The first rank has parts of the version with which all go on. Whoever has none hears what all know of that.
void PartSurvivors::give_newcomers(std::vector<Told>& told, Session& session) {
  if (std::ranges::none_of(told, [](const Told& each) { return each.progress < 0; })) return;
  const auto given = messaging::made_by_first(
      session.mailbox(), session.members(Group::kWorld),
      [&]() -> Value { return Tuple{{states_.outline(), to_value(told), face_.given()}}; }, session.patience());
  if (states_.has_parts()) return;
  const auto& items = given.as<Tuple>().items;
  states_.take_outline(items.at(0));
  told = to_told(items.at(1));
  face_.take_given(items.at(2));
}

}  // namespace lamina::session
