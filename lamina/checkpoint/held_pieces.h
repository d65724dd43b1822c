// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "lamina/archive/piece_reader.h"
#include "lamina/checkpoint/part.h"
#include "lamina/checkpoint/save.h"

namespace lamina::checkpoint {

// [Note: held pieces] A job that changes its layout is a checkpoint that no file has. Each rank keeps the parts that
// the old layout gave it, and tells the others, as a manifest, which of them it would write. In the new layout each
// rank wants regions, as of any checkpoint. The runs that a part and a region have in common travel from the rank that
// keeps the part to the one that wants the region. A rank takes what it has itself from its own memory, but for
// buffers: of these all get what the one has that would write them.

// Parts in the memory of ranks. All ranks make it, and read from it, together.
class HeldPieces : public archive::PieceSource {
 public:
  // Collective over the peers. Keeps the memory of the parts, not copies: `written` are those that this rank would
  // write, `others` those that it has beside another rank. Throws the same on all ranks where a part cannot be listed.
  HeldPieces(const Peers& peers, std::span<const Part> written, std::span<const Part> others);

  const archive::Manifest& manifest() const { return manifest_; }

  // Has this rank read with these from now on: the same ranks, but perhaps connected anew.
  void read_with(Peers peers) { peers_.emplace(std::move(peers)); }

  // Brings what this rank wants, and gives the others what they want. Throws, with the rank that met it, what kept a
  // rank from giving; base::PeerError where one is lost.
  void read(std::span<const archive::Wanted> wanted, const WentOn& went_on) override;
  // There is nothing to be compared: what travels has a checksum.
  void check(std::span<const archive::Wanted>, const WentOn&) override {}
  bool is_collective() const override { return true; }

  // The bytes that this rank has had from others.
  std::uint64_t received_bytes() const { return received_bytes_; }

 private:
  using Key = std::tuple<std::string, archive::Kind, int, std::string>;
  struct Need;
  class Takes;
  class Gives;
  static Key key_of(const archive::SavedTensor& tensor);

  bool take_own(const archive::Wanted& wanted) const;
  std::vector<std::vector<Need>> needs(std::span<const archive::Wanted> wanted) const;

  archive::Manifest manifest_;                      // whose files have the numbers of ranks
  std::multimap<Key, Part> parts_;                  // of this rank; several of a tensor, where it keeps others'
  std::map<std::uint64_t, const Part*> by_offset_;  // those that the manifest lists, by where they begin
  std::optional<Peers> peers_;
  std::uint64_t received_bytes_ = 0;
};

}  // namespace lamina::checkpoint
