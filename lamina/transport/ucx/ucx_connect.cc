// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/transport/ucx/ucx_transport.h"

// Connections with other ranks, and what is told of ranks without one: see [Note: first use] and [Note: news].
namespace lamina::transport::ucx {
namespace {

constexpr auto kLook = std::chrono::milliseconds(250);  // how often neighbours are looked for
constexpr auto kUnexplained = std::chrono::seconds(1);  // after which nobody is going to say how a rank ended

}  // namespace

void UcxTransport::meet(base::Rank rank, contact::Connection& connection, bool in_use) {
  constexpr auto kBefore = base::PeerMemory::kDescriptorSize + LentMemory::kWordSize;
  const std::string& address = connection.told;
  if (address.size() < kBefore) throw base::FormatError("malformed address of a rank");
  Peer& peer = peers_[rank.value];
  liveness_->add(rank, connection);
  peer.met = true;
  if (silence_) silence_->heard(rank);
  peer.outgoing_key = connection.outgoing;
  peer.outgoing.emplace(connection.outgoing);
  receiver_->admit(rank, connection.incoming);
  peer.memory = base::PeerMemory(address.substr(0, base::PeerMemory::kDescriptorSize));
  peer.lends = LentMemory::kind(address.substr(base::PeerMemory::kDescriptorSize, LentMemory::kWordSize));
  peer.address = address.substr(kBefore);
  if (peer.memory.readable()) liveness_->note(rank, Liveness::Kind::kReadable);
  if (!connection.accepted) liveness_->note(rank, Liveness::Kind::kConnected);
  if (in_use || !connection.accepted) open(rank);
}

void UcxTransport::unmeet(base::Rank rank) {
  Peer& peer = peers_[rank.value];
  peer.met = false;
  if (!others_) return;
  others_->forget(rank);
  if (peer.called) call(rank);
}

void UcxTransport::open(base::Rank rank) {
  Peer& peer = peers_[rank.value];
  peer.open = true;
  peer.refused.reset();
  news_.open(rank);
  for (auto& word : std::exchange(peer.words, {})) {
    if (reach(rank) == UCS_OK) post_word(std::move(word), rank);
  }
  for (const auto& passage : std::exchange(peer.early, {})) begin_put(passage);
  tell_news();
  changed_.notify_all();
}

void UcxTransport::call(base::Rank to) {
  if (!others_ || news_.fate(to) != News::Fate::kPresent) return;
  peers_[to.value].called = true;
  others_->call(to);
  worker_->signal();
}

void UcxTransport::await_connection(Lock& lock, base::Rank to, std::int64_t step) {
  const Peer& peer = peers_[to.value];
  if (peer.open) return;
  call(to);
  ++waiting_;
  const bool ended = changed_.wait_for(lock, send_timeout_,
                                       [&] { return peer.open || closing_ || is_given_up(step) || !peer.why.empty(); });
  --waiting_;
  changed_.notify_all();
  if (peer.open) return;
  refuse_if_lost(to);
  if (ended) throw base::CancelledError(base::str("a message to rank ", to, ", which has no connection, was given up"));
  throw base::TimeoutError(rendezvous::no_connection({to}, others_ ? others_->last_failure() : ""),
                           base::Code{"start-no-connection"});
}

void UcxTransport::connect_others() {
  if (!others_) return;
  try {
    auto events = others_->advance();
    for (auto& event : events) take_event(event);
    if (!events.empty() || Clock::now() >= next_look_) look_for_neighbours();
  } catch (const std::exception& error) {
    if (std::exchange(trouble_, error.what()) == error.what()) return;
    base::log_warning(base::str("this rank cannot connect with others: ", trouble_));
  }
}

void UcxTransport::take_event(rendezvous::Switchboard::Event& event) {
  Peer& peer = peers_[event.peer.value];
  if (event.made && peer.open) return;  // nobody who has one in use makes another
  if (event.made) return meet(event.peer, *event.made, false);
  news_.unreachable(event.peer);
  if (event.refused && !peer.met && !peer.refused) peer.refused = Clock::now();
}

void UcxTransport::look_for_neighbours() {
  next_look_ = Clock::now() + kLook;
  for (int rank = 0; rank < size(); ++rank) {
    const Peer& peer = peers_[rank];
    const base::Rank each(rank);
    const bool is_present = news_.fate(each) == News::Fate::kPresent;
    if (is_present && !peer.met && peer.refused && Clock::now() - *peer.refused > kUnexplained && news_.vanished(each))
      learn({each, News::Fate::kVanished});
  }
  for (const base::Rank rank : news_.wanted()) {
    if (!peers_[rank.value].met) others_->call(rank);
  }
  tell_news();
  stop_listening();
}

// Does so where nobody is left to come.
void UcxTransport::stop_listening() {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_.value && !peers_[rank].open && news_.fate(base::Rank(rank)) == News::Fate::kPresent) return;
  }
  if (others_) others_->stop_listening();
}

// A rank with which there is no connection has left, or is lost.
void UcxTransport::learn(const News::Word& word) {
  Peer& about = peers_[word.about.value];
  if (word.fate == News::Fate::kLeft) {
    about.bye = 0;
  } else {
    about.gone = true;
    about.gone_why = why(word.fate);
  }
  about.words.clear();
  about.early.clear();
  if (others_) others_->hang_up(word.about);
  unsettle();
}

void UcxTransport::tell_news() {
  for (const News::Told& told : news_.take())
    liveness_->note(told.to, Liveness::Kind::kNews, Liveness::pack(told.word));
}

bool UcxTransport::has_kept_words() const {
  return std::ranges::any_of(peers_, [](const Peer& peer) { return !peer.words.empty(); });
}

}  // namespace lamina::transport::ucx
