// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/doorway.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <iterator>
#include <utility>

#include "lamina/base/hex.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/contact/secret.h"
#include "lamina/data_parallel/newcomers.h"
#include "lamina/environment/progress.h"
#include "lamina/session/epoch_talk.h"
#include "lamina/session/newcomer.h"

namespace lamina::session {
namespace {

std::optional<environment::ElasticTerms> terms() {
  return environment::ElasticTerms::read(environment::process_environment());
}

// At the first rank of an elastic job; none where its launcher starts nobody anew.
std::unique_ptr<Door> open_door(const Session& session, const Facts& facts) {
  const auto plate = environment::DoorPlate::of_environment();
  const auto secret = contact::inherited_secret();
  if (!plate || !secret) return nullptr;
  return std::make_unique<Door>(*plate, session.world().master_addr, *secret, facts_of(session, facts));
}

std::string hash_of(const std::string& file) {
  std::ifstream bytes(file, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(bytes), {});
  return base::to_hex(contact::digest(text));
}

std::atomic<int> trainings = 0;   // that the program has begun, with doorways of their own
std::atomic<pid_t> watching = 0;  // the process that leaves after SIGTERM, and not one that it forks

void note_sigterm(int) {
  if (::getpid() == watching) {
    data_parallel::newcomers().leaves = true;
  } else {
    ::signal(SIGTERM, SIG_DFL);
    ::raise(SIGTERM);
  }
}

}  // namespace

void end_if_newcomer(const std::string& why) {
  if (!environment::is_newcomer()) return;
  base::log_info("nobody joins the job: " + why);
  throw ProcessEnds{};
}

Facts facts_of_training(const std::string& kind, const std::string& file,
                        const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                        const model::ParameterTable* table, const std::string& optimizer,
                        const std::vector<std::size_t>& groups) {
  std::string model, all = optimizer;
  for (const auto& [name, tensor] : tensors) {
    const auto* row = table == nullptr ? nullptr : table->find(tensor);
    const auto sizes = row == nullptr ? tensor.sizes() : at::IntArrayRef(row->layout.shape);
    model += base::str(model.empty() ? "" : "\n", name, " ", tensor.scalar_type(), " ", sizes);
  }
  for (const auto count : groups) all += base::str("\na group of ", count, " parameters");
  return {{kind + " (SHA-256)", hash_of(file)}, {"model", model}, {"optimizer", all}};
}

Doorway::Doorway(std::function<Facts()> facts)
    : facts_(std::move(facts)), terms_(terms().value_or(environment::ElasticTerms())) {}

Doorway::~Doorway() { forget_sigterm(); }

Facts Doorway::facts() const {
  auto facts = facts_();
  facts.emplace_back("place in its script", base::str("training number ", training_));
  return facts;
}

void Doorway::begin() { training_ = ++trainings; }

bool Doorway::is_open() { return terms().has_value(); }

void Doorway::begin_epoch(Session& session, std::function<std::string(int)> why_not) {
  data_parallel::newcomers().heard = false;
  if (terms_.most == 0 || session.world().rank != base::Rank(0)) {
    door_.reset();
    return;
  }
  if (door_ == nullptr) door_ = open_door(session, facts());
  if (door_ == nullptr) return;
  door_->set_terms({.ranks = session.world().size,
                    .most = terms_.most,
                    .why_not = std::move(why_not),
                    .every = terms_.join_every,
                    .facts = [this, &session] { return facts_of(session, facts()); }});
  tell_door(session, *door_);
}

void Doorway::take_over(Doorway& before) {
  training_ = before.training_;
  before.door_.reset();
  before_ = std::exchange(before.before_, std::nullopt);
}

bool Doorway::is_called(Session& session) const {
  session.epochs().look_after_witness();
  if (session.world().size == 1) return leaves() || has_waiting();
  hear_of_door(session);
  return data_parallel::newcomers().heard;
}

void Doorway::end(const Session& session) {
  if (door_ != nullptr) {
    door_->end();
  } else if (terms_.most != 0) {
    end_door(session);
  }
  door_.reset();
}

void Doorway::watch_sigterm() {
  struct sigaction now{};
  if (!terms() || ::sigaction(SIGTERM, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
  before_ = now;
  watching = ::getpid();
  now.sa_handler = note_sigterm;
  now.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &now, nullptr);
}

void Doorway::forget_sigterm() {
  if (!before_) return;
  struct sigaction now{};
  ::sigaction(SIGTERM, nullptr, &now);
  if (now.sa_handler == note_sigterm) ::sigaction(SIGTERM, &*before_, nullptr);
  before_.reset();
  if (data_parallel::newcomers().leaves.exchange(false)) ::kill(::getpid(), SIGTERM);  // the training was over before
}

bool Doorway::leaves() { return data_parallel::newcomers().leaves; }

void Doorway::leave(bool others_go_on) {
  data_parallel::newcomers().leaves = false;
  if (!others_go_on && door_ != nullptr) door_->end();
  door_.reset();
  if (others_go_on) environment::ProgressReporter().leaves();
  base::log_info("told by SIGTERM to end: this rank has left, after an update that counts");
  throw ProcessEnds{others_go_on ? 0 : 128 + SIGTERM};
}

void end_if_told() {
  if (!Doorway::leaves()) return;
  std::signal(SIGTERM, SIG_DFL);
  ::kill(::getpid(), SIGTERM);
}

}  // namespace lamina::session
