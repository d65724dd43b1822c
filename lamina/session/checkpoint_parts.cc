// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/checkpoint_parts.h"

#include "lamina/layout/place.h"

namespace lamina::session {

CheckpointParts::CheckpointParts(const Session& session, const model::ParameterTable& table)
    : session_(session), table_(table), writers_(table, session.topology()) {}

CheckpointParts::Place CheckpointParts::of(const layout::ParameterLayout& layout) const {
  const auto& topology = session_.topology();
  const auto place = layout::place(layout, topology, topology.coordinates(session_.world().rank));
  base::internal_check(place.has_value(), "a part of what is not here");
  return {layout.shape, layout::held(layout, place->slice, place->shard),
          place->copy == writers_.copy_of(layout, topology)};
}

CheckpointParts::Place CheckpointParts::of_whole(at::IntArrayRef sizes) const {
  return {sizes.vec(), layout::whole(sizes.vec()), session_.world().rank == base::Rank(0)};
}

CheckpointParts::Place CheckpointParts::of_place(const at::Tensor& place, std::string_view name) const {
  const auto* row = table_.find(name);
  if (row == nullptr) return of_whole(place.sizes());
  auto own = of(row->update);
  base::internal_check(checkpoint::count(own.region) <= place.numel(), "what is updated is what the table says");
  own.region.size = place.numel();  // some are not padded
  return own;
}

CheckpointParts::Place CheckpointParts::of_state(const LocalParameters& locals, const at::Tensor& place,
                                                 std::string_view name, at::IntArrayRef sizes) const {
  const bool is_owner = locals.updates_whole(place);
  if (!sizes.empty() && sizes == place.sizes() && !is_owner) return of_place(place, name);
  auto whole = of_whole(sizes);
  if (const auto* row = table_.find(name)) {
    const auto own = of(row->update);
    whole.writes = own.writes && (is_owner || own.region.begin == 0);
  }
  return whole;
}

checkpoint::Peers peers_of(Session& session) {
  return {session.members(topology::Group::kWorld), session.mailbox(), session.patience(),
          [&session] { session.job().goes_on(); }};
}

}  // namespace lamina::session
