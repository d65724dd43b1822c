// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::transport {

// The cause of the loss of a rank that has left by itself.
inline constexpr auto kCalledShutdown = "it called shutdown";

// [Note: news] A rank has liveness sockets to the ranks at distances 1, 2, 4, ... before and after it, and to those
// with which it exchanges messages: not to all. If it loses one, or hears that one leaves, it tells all with whom it is
// connected, and so does each rank that hears of it for the first time. It is everywhere after log2(n) words, one after
// the other. This holds:
//   - An own socket is believed before what others say: a word about a rank with which one is connected is dropped. So
//     a link that breaks between two others makes nobody lost who is connected with both.
//   - Any ranks may die at once, as long as fewer do than one has neighbours: the rest is connected, and all is told
//     within it. A run of any length between two others leaves the rest connected, too.
//   - Where the rest falls apart, each part borders on dead ranks alone, and has lost those itself: nobody hears of
//     nothing. The parts find each other again, as neighbours are counted anew among the ranks that are left (wanted),
//     and who connects with another tells it all that he knows.
//   - Ranks that leave one after the other take nothing along that others need, for the same two reasons.
// This is the knowledge of one rank, without sockets or time.
class News {
 public:
  enum class Fate : std::uint8_t { kPresent, kLeft, kEnded, kInterrupted, kBroken, kForeign, kVanished, kSilent };
  struct Word {
    base::Rank about;
    Fate fate = Fate::kPresent;
  };
  struct Told {
    base::Rank to;
    Word word;
  };

  News(base::Rank self, int size);

  // A connection works from now on.
  void open(base::Rank peer);
  // It has closed, and why: the peer has ended, unless it had said that it leaves.
  void closed(base::Rank peer, Fate why);
  // A connected peer says that it leaves.
  void left(base::Rank peer);
  // A connected peer tells of another rank. False where that is no news.
  bool hear(base::Rank from, Word word);
  // No connection could be made: another one is wanted in its place until it is there.
  void unreachable(base::Rank peer);
  // It has refused connections for so long that nobody is left who knows how it ended. False where all others are
  // there: they would know of an end.
  bool vanished(base::Rank peer);

  Fate fate(base::Rank of) const { return ranks_[of.value].fate; }
  bool is_open(base::Rank peer) const { return ranks_[peer.value].open; }
  // The ranks that this one should be connected with and is not.
  std::vector<base::Rank> wanted() const;
  // Words to send, in their order. The caller takes them out.
  std::vector<Told> take();

 private:
  struct Known {
    Fate fate = Fate::kPresent;
    bool open = false, unreachable = false;
  };
  bool learn(base::Rank from, Word word);

  const base::Rank self_;
  std::vector<Known> ranks_;
  std::vector<Told> words_;
};

// A clause that says how a rank ended.
const char* why(News::Fate fate);

// The ranks at distances 1, 2, 4, ... before and after the one at `place`, of `ranks` in a circle: without itself, each
// once, in their order.
std::vector<base::Rank> neighbours(const std::vector<base::Rank>& ranks, std::size_t place);

}  // namespace lamina::transport
