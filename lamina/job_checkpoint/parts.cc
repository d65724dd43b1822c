// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/parts.h"

#include "lamina/layout/place.h"

namespace lamina::job_checkpoint {

Parts::Parts(collective::Ranks ranks, const model::ParameterTable& table)
    : ranks_(std::move(ranks)), table_(table), writers_(table, ranks_.topology) {}

Parts::Piece Parts::of(const layout::ParameterLayout& layout) const {
  const auto& topology = ranks_.topology;
  const auto place = layout::place(layout, topology, topology.coordinates(ranks_.own));
  base::internal_check(place.has_value(), "a part of what is not here");
  return {layout.shape, layout::held(layout, place->slice, place->shard),
          place->copy == writers_.copy_of(layout, topology), place->slice == 0 && place->shard == 0, layout.slicing};
}

Parts::Piece Parts::of_whole(at::IntArrayRef sizes) const {
  return {sizes.vec(), layout::whole(sizes.vec()), ranks_.own == base::Rank(0), true};
}

Parts::Piece Parts::of_local(const at::Tensor& local, std::string_view name) const {
  const auto* row = table_.find(name);
  if (row == nullptr) return of_whole(local.sizes());
  auto own = of(row->update);
  base::internal_check(checkpoint::count(own.region) <= local.numel(), "what is updated is what the table says");
  own.region.size = local.numel();  // some are not padded
  return own;
}

Parts::Piece Parts::of_state(const LocalParameters& locals, const at::Tensor& local, std::string_view name,
                             at::IntArrayRef sizes) const {
  const bool is_owner = locals.updates_whole(local);
  if (!sizes.empty() && sizes == local.sizes() && !is_owner) return of_local(local, name);
  auto whole = of_whole(sizes);
  if (const auto* row = table_.find(name)) {
    const auto own = of(row->update);
    whole.writes = own.writes && (is_owner || own.is_first);
  }
  return whole;
}

at::Tensor Parts::whole_of(const Piece& piece, const at::Tensor& elements) const {
  return distributed_optimizer::SliceRanks(ranks_).whole_of(elements, *piece.slicing);
}

}  // namespace lamina::job_checkpoint
