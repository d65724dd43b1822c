// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/make_table.h"

#include <unordered_map>
#include <vector>

#include "lamina/model/overlaps.h"
#include "lamina/model/persistence.h"
#include "lamina/value/away.h"
#include "lamina/value/dtype.h"

namespace lamina::model {
namespace {

// The memory of tensors among each other.
class Memories {
 public:
  explicit Memories(std::span<const NamedTensor> tensors) : tensors_(tensors), partner_(tensors.size()) {
    std::vector<at::Tensor> all;
    for (const auto& each : tensors) {
      ++sharers_[value::memory_of(each.tensor)];
      all.push_back(each.tensor);
    }
    for (const auto& group : overlaps(all)) {
      for (const auto i : group) partner_[i] = i == group[0] ? group[1] : group[0];
    }
  }

  // True of a tensor that has a memory to itself, all of it; of one whose value is delayed, too.
  bool is_alone(std::size_t number) const {
    const auto& tensor = tensors_[number].tensor;
    const auto* memory = value::memory_of(tensor);
    if (memory == nullptr) return true;
    return sharers_.at(memory) == 1 && !partner_[number] && tensor.storage_offset() == 0 &&
           memory->nbytes() == tensor.nbytes();
  }
  // True where a parameter lies in its memory, too.
  bool has_parameter(std::size_t number) const { return partner_[number] && !tensors_[*partner_[number]].buffer; }

 private:
  std::span<const NamedTensor> tensors_;
  std::unordered_map<const void*, int> sharers_;  // how many name a memory
  // Another tensor whose memory meets it, also where each has named that by itself, as over NumPy's: a parameter where
  // there is one.
  std::vector<std::optional<std::size_t>> partner_;
};

}  // namespace

bool is_odd(const at::Tensor& buffer) { return buffer.layout() != at::kStrided || buffer.is_quantized(); }

bool updates_masters(const config::Config& config) { return config.fp16 || config.bf16; }

std::optional<topology::Group> updates_divided_over(const topology::Topology& topology, const config::Config& config) {
  if (config.sharded_data_parallel_degree > 1) return topology::Group::kShard;
  if (config.shard_optimizer_state && topology.size(topology::kSameParts) > 1) return topology::kSameParts;
  return {};
}

// Copies divide what has dimensions, which its states have, too, wherever its elements lie, for that may change; but
// not parameters that lie in one memory.
ParameterTable make_table(const topology::Topology& topology, const config::Config& config, const Cut& cut,
                          std::span<const NamedTensor> tensors, Slice slice_here) {
  const Memories memories(tensors);
  const bool copies_divide = updates_divided_over(topology, config) == topology::kSameParts;
  std::vector<Parameter> rows;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor, buffer, slicing] = tensors[i];
    auto& row =
        rows.emplace_back(whole_in(cut.owner_of(name), name, tensor, buffer, topology.size(topology::kReplicas)));
    const bool is_sharded = !buffer && memories.is_alone(i) && may_be_sharded(name, tensor, config);
    if (slicing) slice(row, *slicing);
    row.reduction.divisor = topology.size(row.reduction.over);
    row.layout.shards = row.update.shards = is_sharded ? config.sharded_data_parallel_degree : 1;
    const bool is_divided = copies_divide && tensor.dim() > 0 && tensor.numel() > 0 && !memories.has_parameter(i);
    if (is_divided) row.update.shards = topology.size(topology::kSameParts);
    if (updates_masters(config) && value::is_half(tensor.scalar_type())) row.update.dtype = layout::DType::kFloat32;
  }
  return {std::move(rows), cut.here(), topology.size(topology::kPartitions), slice_here};
}

}  // namespace lamina::model
