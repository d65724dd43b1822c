// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/part_survivors.h"

#include <utility>

#include "lamina/base/error.h"
#include "lamina/session/next_layout.h"
#include "lamina/session/next_place.h"
#include "lamina/session/peers.h"

namespace lamina::session {
namespace {

using topology::Group;
using value::Tuple;
using value::Value;

constexpr int kChanges = 20;  // bits

}  // namespace

PartSurvivors::Talk::Talk(std::shared_ptr<Session> its)
    : session(std::move(its)), end(*session), epochs(epoch_of_environment()) {}

PartSurvivors::PartSurvivors(PartsFace& face, SurvivorOptions options, std::optional<std::int64_t> every,
                             std::vector<std::string> layouts)
    : Survivors(face, std::move(options)), face_(face), pace_(every), layouts_(std::move(layouts)) {
  note_update();
}

PartSurvivors::~PartSurvivors() = default;

void PartSurvivors::begin() {
  end_if_newcomer("its ranks have parts of the model");
  is_on_ = true;
  note_update();
}

void PartSurvivors::end() {
  session_->mailbox().barrier(session_->members(Group::kWorld), session_->patience());
  is_on_ = false;
}

bool PartSurvivors::is_due() const { return is_on_ && (kept_.lock() != session_ || pace_.is_due(face_.progress())); }

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

Survivors::Next PartSurvivors::meet(bool is_lost) {
  const bool leaves = !is_lost && doorway_.leaves();
  face_.end_saves(is_lost);
  if (!talk_ || talk_->session != session_) {
    talk_.reset();
    talk_.emplace(session_);
  }
  const auto told = face_.told();
  while (true) {
    const auto next = [&] {
      const FreePort port(*session_);
      const Value word = Tuple{{std::int64_t{port.number()}, states_.told(session_->mailbox()), face_.word()}};
      return talk_->end.next(word, 0, leaves);  // the lowest rank leads
    }();
    if (leaves) leave(next);
    std::vector<Value> kept;
    for (const auto& word : next.words) kept.push_back(word.as<Tuple>().items.at(1));
    states_.decide(kept);
    auto config = next_layout(*session_, next.size(), layouts_, told, shares_any());
    const auto port = next.words.front().as<Tuple>().items.at(0).as<std::int64_t>();
    auto world = next_place(*session_, next, static_cast<int>(port));
    take_place(world, talk_->epochs + next.number);
    Next result;
    try {
      result.session = talk_->end.open_in(next, std::move(config), std::move(world), options_.hooks());
    } catch (const base::PeerError&) {
      continue;  // they agree anew
    }
    note(next);
    for (const auto& word : next.words) {
      result.told.push_back({.progress = states_.updates(), .word = word.as<Tuple>().items.at(2)});
    }
    return result;
  }
}

std::vector<Told> PartSurvivors::go_over(Next next) {
  const auto held = states_.hold(peers_of(*next.session));
  switch_to(next.session, [&] { face_.go_over(next.session, held); });
  face_.take(states_.word());
  talk_.reset();
  note_update();
  pace_.go_on_from(face_.progress());
  keep();
  return std::move(next.told);
}

}  // namespace lamina::session
