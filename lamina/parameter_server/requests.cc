// SPDX-License-Identifier: Apache-2.0
// States of a request: sent, answered. It is known by its number until it is answered, or nobody waits for it.
//
// Threads: whoever asks and awaits; the transport's brings answers and losses. Locks: mutex_, under which nothing else
// is taken. Sends go without it.
#include "lamina/parameter_server/requests.h"

#include <utility>

#include "lamina/base/str.h"
#include "lamina/device/copies.h"
#include "lamina/parameter_server/turns.h"

namespace lamina::parameter_server {

struct Requests::Pending {
  std::int64_t number = 0;
  base::Rank owner;
  base::Rank origin;  // of its context, or this rank
  std::string what;
  bool answered = false;
  Answer answer;
};

namespace {

base::PeerError lost(const std::string& what, const base::Loss& loss) {
  return base::PeerError(
      base::str(what, ": ", loss.text(), "; what it owned is gone with it: start the job again from a saved state"),
      loss, base::Code{"remote-owner-lost"});
}

}  // namespace

Requests::Requests(messaging::Messenger& messenger) : messenger_(messenger) {
  messenger_.handlers().on(kAnswer, [this](transport::Message&& message) { receive(std::move(message)); });
}

Requests::Asked Requests::ask(base::Rank owner, Request request, std::string what, AutogradContext* context) {
  auto asked = std::make_shared<Pending>();
  asked->owner = owner;
  asked->origin = context != nullptr ? context->id.origin : messenger_.rank();
  asked->what = std::move(what);
  {
    const std::lock_guard guard(mutex_);
    if (closed_) throw base::CancelledError(asked->what + ": the job has ended");
    if (const auto found = lost_.find(owner); found != lost_.end()) throw lost(asked->what, found->second);
    asked->number = ++numbers_;
    pending_[asked->number] = asked;
  }
  request.asker = messenger_.rank();
  request.number = asked->number;
  if (context != nullptr) request.context = context->id;
  try {
    const auto message = to_message(std::move(request));
    const auto send = [&] { messenger_.transport().send(owner, message); };
    context != nullptr ? context->reach(owner, send) : send();
  } catch (const base::PeerError& error) {
    forget(asked->number);
    if (error.loss()) throw lost(asked->what, *error.loss());
    throw;
  } catch (...) {
    forget(asked->number);
    throw;
  }
  return asked;
}

value::Value Requests::await(const Asked& asked, const base::Patience& patience) {
  {
    const Turns::Pause pause;
    std::unique_lock lock(mutex_);
    const auto ready = [&] {
      if (asked->answered) return true;
      if (closed_) throw base::CancelledError(asked->what + ": the job has ended");
      if (const auto found = lost_.find(asked->owner); found != lost_.end()) throw lost(asked->what, found->second);
      if (lost_.contains(asked->origin)) {  // the owner knows that, too, and may answer nothing
        throw base::CancelledError(base::str(asked->what, ": rank ", asked->origin, ", whose context it is, is lost"));
      }
      return false;
    };
    try {
      base::wait_until(lock, changed_, patience, ready, [&] { return asked->what; });
    } catch (...) {
      if (lock.owns_lock()) lock.unlock();
      forget(asked->number);
      throw;
    }
  }
  if (asked->answer.failure) throw value::RemoteFailure(*asked->answer.failure);
  value::for_each_tensor(asked->answer.body, &devices::join_arrival);
  return std::move(asked->answer.body);
}

std::int64_t Requests::number(const Asked& asked) { return asked->number; }

void Requests::receive(transport::Message&& message) {
  auto answer = to_answer(std::move(message));
  const std::lock_guard guard(mutex_);
  const auto found = pending_.find(answer.number);
  if (found == pending_.end()) return;  // nobody waits for it any more
  found->second->answer = std::move(answer);
  found->second->answered = true;
  pending_.erase(found);
  changed_.notify_all();
}

void Requests::forget(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  pending_.erase(number);
}

void Requests::lose(const base::Loss& loss) {
  const std::lock_guard guard(mutex_);
  lost_.emplace(loss.rank, loss);
  changed_.notify_all();
}

void Requests::close() {
  const std::lock_guard guard(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace lamina::parameter_server
