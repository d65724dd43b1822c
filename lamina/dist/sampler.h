// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lamina::dist {

// Chooses the samples that a rank reads, in the order of Python's samplers. By default it is torch's
// DistributedSampler, which repeats samples where they do not divide by the ranks. If `exact`, it is
// lamina.dist.ExactSampler, and repeats none: one rank with batches as large as all theirs together would read the same
// ones in batch t. Has what torch::data::make_data_loader asks of a sampler. Not thread-safe.
class Sampler {
 public:
  struct Part {
    std::int64_t size = 0;  // samples in all
    int num_replicas = 1;
    int rank = 0;
    bool shuffle = false;
    std::uint64_t seed = 0;
    bool drop_last = false;
    bool exact = false;
  };
  // Throws base::ConfigError for a rank that is none of the replicas, no samples, or, if exact, fewer than replicas.
  explicit Sampler(const Part& part);

  // Before each epoch, or else all have the same order; then reset(), which the data loader calls.
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }

  // All samples of this epoch that are this rank's.
  std::vector<std::size_t> indices() const;
  std::size_t size() const;

  // The weights of the losses of this rank's batches, means over `batch_size` samples or what is left: with them the
  // average over the ranks is that over the samples. All are 1 but the last one's, when ranks have different numbers of
  // samples; where a rank has no batch any more, it is 0: what is collective takes its last batch once more.
  std::vector<double> batch_weights(std::size_t batch_size, bool drop_last = false) const;

  using BatchRequestType = std::vector<std::size_t>;
  void reset(std::optional<std::size_t> size = std::nullopt);  // to the beginning of the epoch; of as many samples
  std::optional<BatchRequestType> next(std::size_t batch_size);

 private:
  std::int64_t total() const;  // of all ranks

  Part part_;
  std::uint64_t epoch_ = 0;
  std::optional<std::vector<std::size_t>> order_;  // since reset()
  std::size_t at_ = 0;
};

}  // namespace lamina::dist
