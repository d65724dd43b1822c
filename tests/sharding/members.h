// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/str.h"
#include "lamina/collective/backend.h"
#include "lamina/collective/group.h"

namespace lamina::sharding {

// The members of a sharding group as threads of this process, each with its own end of the group.
enum class Over : std::uint8_t { kSharedMemory, kGloo };

inline void together(int size, Over over, const std::function<void(collective::Group& group)>& work) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<base::Rank> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(rank);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const collective::BackendOptions options{.store = store,
                                               .rank = rank,
                                               .members = ranks,
                                               .timeout = std::chrono::seconds(30),
                                               .gloo_host = "127.0.0.1"};
      try {
        const auto backend = over == Over::kGloo ? collective::make_gloo(options) : collective::make_backend(options);
        observe::Recorder recorder;
        recorder.start({.ranks = {observe::RankRecord()}});
        const auto group = collective::wrap(collective::make_group(options, backend),
                                            {"shards", ranks, base::Rank(rank)}, {.recorder = &recorder});
        work(*group);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "member " << rank << ": " << error.what();
      }
    });
  }
}

}  // namespace lamina::sharding
