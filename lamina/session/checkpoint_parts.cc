// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/checkpoint_parts.h"

#include "lamina/layout/place.h"

namespace lamina::session {

using topology::Group;

CheckpointParts::CheckpointParts(const Session& session, const model::ParameterTable& table)
    : session_(session), table_(table), writers_(table, session.topology()) {}

bool CheckpointParts::writes(const model::Parameter& row) const {
  const auto& topology = session_.topology();
  const auto place = layout::place(row.layout, topology, topology.coordinates(session_.world().rank));
  return place && place->copy == writers_.copy_of(row.layout.name);
}

CheckpointParts::Place CheckpointParts::of_row(const model::Parameter& row) const {
  const auto& topology = session_.topology();
  const auto place = layout::place(row.layout, topology, topology.coordinates(session_.world().rank));
  base::internal_check(place.has_value(), "a part of what is not here");
  return {row.layout.shape, layout::held(row.layout, place->slice, place->shard),
          place->copy == writers_.copy_of(row.layout.name)};
}

// Says so of what belongs to a parameter of that name: copies that divide parameters each write their parts.
bool CheckpointParts::writes(const LocalParameters& locals, bool is_part, std::string_view name) const {
  if (is_part && locals.divided_over() != Group::kShard) return true;
  const auto* row = table_.find(name);
  return row != nullptr ? writes(*row) : session_.world().rank == base::Rank(0);
}

CheckpointParts::Place CheckpointParts::of_place(const LocalParameters& locals, const at::Tensor& place,
                                                 std::string_view name) const {
  const auto part = locals.part(place);
  const bool is_writer = writes(locals, part.has_value(), name);
  if (!part) return {place.sizes().vec(), layout::whole(place.sizes().vec()), is_writer};
  auto shape = part->parameter.sizes().vec();
  const auto [begin, end] = locals.range(*part);
  auto region = checkpoint::within(layout::whole(shape), begin, end);
  region.size = place.numel();
  return {std::move(shape), std::move(region), is_writer};
}

CheckpointParts::Place CheckpointParts::of_state(const LocalParameters& locals, const at::Tensor& place,
                                                 std::string_view name, at::IntArrayRef sizes) const {
  const auto part = locals.part(place);
  const bool is_owner = part && locals.updates_whole(place);
  const bool is_like = !sizes.empty() && sizes == place.sizes();
  if (part && is_like && !is_owner) return of_place(locals, place, name);
  const bool is_first = !part || is_owner || locals.range(*part).first == 0;
  return {sizes.vec(), layout::whole(sizes.vec()), is_first && writes(locals, part.has_value(), name)};
}

checkpoint::Peers peers_of(Session& session) {
  return {session.members(Group::kWorld), session.mailbox(), session.patience(),
          [&session] { session.job().goes_on(); }};
}

}  // namespace lamina::session
