// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::dist {
namespace {

// Returns what torch.randperm gives a Python sampler for this seed.
std::vector<std::size_t> shuffled(std::int64_t count, std::uint64_t seed) {
  const auto order = at::randperm(count, at::make_generator<at::CPUGeneratorImpl>(seed), at::kLong);
  const auto* first = order.const_data_ptr<std::int64_t>();
  return {first, first + count};
}

std::int64_t divided_up(std::int64_t number, std::int64_t by) { return (number + by - 1) / by; }

}  // namespace

Sampler::Sampler(const Part& part) : part_(part) {
  if (part.num_replicas < 1 || part.rank < 0 || part.rank >= part.num_replicas) {
    throw base::ConfigError(base::str("rank ", part.rank, " is none of ", part.num_replicas, " that read samples"));
  }
  if (part.size < 1) throw base::ConfigError(base::str("a sampler of ", part.size, " samples: give it one or more"));
  if (part.exact && part.size < part.num_replicas) {
    throw base::ConfigError(base::str(part.size, " samples cannot be split over ", part.num_replicas,
                                      " ranks: use at most ", part.size, " ranks"));
  }
}

std::int64_t Sampler::total() const {
  const std::int64_t replicas = part_.num_replicas;
  const std::int64_t left = part_.size % replicas;
  if (part_.exact) return part_.drop_last ? part_.size - left : part_.size;
  const std::int64_t each =
      part_.drop_last && left != 0 ? divided_up(part_.size - replicas, replicas) : divided_up(part_.size, replicas);
  return each * replicas;
}

std::size_t Sampler::size() const {
  return static_cast<std::size_t>(divided_up(std::max<std::int64_t>(total() - part_.rank, 0), part_.num_replicas));
}

std::vector<std::size_t> Sampler::indices() const {
  std::vector<std::size_t> order;
  if (part_.shuffle) order = shuffled(part_.size, part_.seed + epoch_);
  std::vector<std::size_t> mine;
  for (std::int64_t at = part_.rank; at < total(); at += part_.num_replicas) {
    const auto place = static_cast<std::size_t>(at % part_.size);  // beyond the end it begins again
    mine.push_back(part_.shuffle ? order[place] : place);
  }
  return mine;
}

std::vector<double> Sampler::batch_weights(std::size_t batch_size, bool drop_last) const {
  std::vector<double> weights;
  const std::int64_t together = static_cast<std::int64_t>(batch_size) * part_.num_replicas;
  for (std::int64_t begin = 0; begin < total(); begin += together) {
    const auto everybody = std::min(total() - begin, together);
    if (drop_last && everybody < together) break;
    const auto mine = divided_up(std::max<std::int64_t>(everybody - part_.rank, 0), part_.num_replicas);
    weights.push_back(static_cast<double>(mine * part_.num_replicas) / static_cast<double>(everybody));
  }
  return weights;
}

void Sampler::reset(std::optional<std::size_t> size) {
  if (size) part_.size = static_cast<std::int64_t>(*size);
  order_ = indices();
  at_ = 0;
}

std::optional<Sampler::BatchRequestType> Sampler::next(std::size_t batch_size) {
  if (!order_) reset();
  if (at_ >= order_->size()) return {};
  const std::size_t end = std::min(at_ + batch_size, order_->size());
  BatchRequestType batch(order_->begin() + static_cast<std::ptrdiff_t>(at_),
                         order_->begin() + static_cast<std::ptrdiff_t>(end));
  at_ = end;
  return batch;
}

}  // namespace lamina::dist
