// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/news.h"

#include <algorithm>
#include <set>
#include <utility>

#include "lamina/base/error.h"

namespace lamina::transport {

News::News(base::Rank self, int size) : self_(self), ranks_(static_cast<std::size_t>(size)) {}

void News::open(base::Rank peer) {
  Known& known = ranks_[peer.value];
  known.open = true;
  known.unreachable = false;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const base::Rank about(static_cast<std::int64_t>(rank));
    if (about != peer && ranks_[rank].fate != Fate::kPresent) words_.push_back({peer, {about, ranks_[rank].fate}});
  }
}

void News::closed(base::Rank peer, Fate why) {
  ranks_[peer.value].open = false;
  learn(peer, {peer, why});
}

void News::left(base::Rank peer) { learn(peer, {peer, Fate::kLeft}); }

bool News::hear(base::Rank from, Word word) {
  return word.about != self_ && !ranks_[word.about.value].open && learn(from, word);
}

bool News::learn(base::Rank from, Word word) {
  Known& known = ranks_[word.about.value];
  if (known.fate != Fate::kPresent) return false;
  known.fate = word.fate;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const base::Rank to(static_cast<std::int64_t>(rank));
    if (ranks_[rank].open && to != from && to != word.about) words_.push_back({to, word});
  }
  return true;
}

void News::unreachable(base::Rank peer) { ranks_[peer.value].unreachable = true; }

bool News::vanished(base::Rank peer) {
  const bool all_present = std::ranges::all_of(ranks_, [](const Known& each) { return each.fate == Fate::kPresent; });
  return !all_present && learn(peer, {peer, Fate::kVanished});
}

std::vector<base::Rank> News::wanted() const {
  std::vector<base::Rank> present;
  std::size_t own = 0;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const base::Rank each(static_cast<std::int64_t>(rank));
    if (each == self_) own = present.size();
    if (ranks_[rank].fate == Fate::kPresent && !ranks_[rank].unreachable) present.push_back(each);
  }
  std::vector<base::Rank> wanted = neighbours(present, own);
  std::erase_if(wanted, [&](base::Rank rank) { return ranks_[rank.value].open; });
  return wanted;
}

std::vector<News::Told> News::take() { return std::exchange(words_, {}); }

const char* why(News::Fate fate) {
  switch (fate) {
    case News::Fate::kLeft:
      return kCalledShutdown;
    case News::Fate::kInterrupted:
      return base::kInterrupted;
    case News::Fate::kBroken:
      return "its connection with another rank broke";
    case News::Fate::kForeign:
      return "somebody interfered with its connection";
    case News::Fate::kVanished:
      return "it takes no connections any more";
    case News::Fate::kSilent:
      return "it has given no sign of life for silent_s";
    case News::Fate::kEnded:
    case News::Fate::kPresent:
      break;
  }
  return "its process ended";
}

std::vector<base::Rank> neighbours(const std::vector<base::Rank>& ranks, std::size_t place) {
  std::set<base::Rank> found;
  const std::size_t size = ranks.size();
  for (std::size_t distance = 1; distance <= size / 2; distance *= 2) {
    found.insert(ranks[(place + distance) % size]);
    found.insert(ranks[(place + size - distance) % size]);
  }
  found.erase(ranks[place]);
  return {found.begin(), found.end()};
}

}  // namespace lamina::transport
