// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lamina/dist/sampler.h"
#include "lamina/value/value.h"

// torch's collectives for every program, as lamina.dist has them in Python. Without a launcher the world has one rank,
// on which each function does what it would there. Under torchrun, `lamina run`, srun or mpirun the world is theirs.
//
//     dist::initialize_dist();
//     dist::run_local_rank_zero_first([&] { data = download(); });
//     auto loader = torch::data::make_data_loader(data, dist::get_sampler(*data.size(), {.shuffle = true}), 8);
//
// All but the ranks and the samplers is collective: every rank calls it, in the same order and from one thread. In a
// world of several ranks collectives need initialize_dist, else they throw base::UsageError. They throw
// base::PeerError when a rank is gone, base::TimeoutError when one does not come in time.
namespace lamina::dist {

using value::Value;

// Identity of this process: what the launcher says, else a world of one. Before initialize_dist too. Throw
// base::ConfigError when a variable is no number, base::UsageError when it has changed since initialize_dist.
int get_world_size();
int get_global_rank();
int get_local_world_size();  // ranks on this machine
int get_local_rank();        // this rank among them
int get_node_rank();         // this machine among those of the job

bool is_available();    // always: torch has c10d
bool is_initialized();  // between initialize_dist and destroy_dist

// Makes the group of all ranks; every rank calls it. A program that nobody launched opens no port. Does nothing when
// there is a group already. `device` is "cpu" (Gloo): there is no other in C++ yet. `timeout` is how long the ranks,
// and each collective, wait for each other. Throws base::ConfigError for what cannot be, and when two processes have
// the same rank; base::TimeoutError, which names the ranks that did not come.
void initialize_dist(const std::string& device = "cpu", std::chrono::milliseconds timeout = std::chrono::seconds(300));
void destroy_dist();  // ends it, as the end of the process does

void barrier();
// In place. `reduce_operation` is SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR, in any case.
void all_reduce(const at::Tensor& tensor, const std::string& reduce_operation = "SUM");
void broadcast(const at::Tensor& tensor, int src);  // in place
// The tensors of all ranks, of one shape and dtype, in the order of the ranks.
std::vector<at::Tensor> all_gather(const at::Tensor& tensor);

// Trees of values (lamina/value/value.h), whose tensors may differ in all from rank to rank.
void broadcast_object_list(std::vector<Value>& objects, int src = 0);  // in place; equally many everywhere
std::vector<Value> all_gather_object(const Value& object);

// Runs `body` on local rank 0 of every machine first, and then, when all of these have ended it, on the others. When it
// throws on a local rank 0, that rank gets its own exception and the others value::RemoteFailure, without having run
// it.
void run_local_rank_zero_first(const std::function<void()>& body);

// A name for a file of this machine: random, and the same on all of its ranks. Collective.
std::string get_node_signal_file_name();
// The path of that file, in `folder` or the current one; local rank 0 writes it, and makes the folder.
std::string write_signal_file(const std::string& name, const std::string& folder = "");

// For work that takes longer than a collective may wait.
// Runs `body` on all ranks; those that end it wait until local rank 0 of their machine has, however long that takes.
// When it throws on a rank, that one gets its own exception and the others value::RemoteFailure.
void busy_wait_for_local_rank_zero(const std::function<void()>& body, const std::string& folder = "");
// Runs `body` on local rank 0, and on the others once the file is there. They throw base::PeerError when local rank 0
// has thrown.
void local_rank_zero_download_and_wait(const std::string& expected_file, const std::function<void()>& body);

// The sampler with which each rank reads its part of `size` samples. Throws base::ConfigError for fewer than none.
struct SamplerOptions {
  bool drop_last = false;  // leave samples out, rather than repeat some, so that all ranks have equally many
  bool shuffle = false;
  int num_replicas = 0;  // 0: all ranks of the world
  int rank = -1;         // -1: this one
  std::uint64_t seed = 0;
  bool exact = false;  // no sample is repeated: see Sampler
};
Sampler get_sampler(std::int64_t size, const SamplerOptions& options = {});

}  // namespace lamina::dist
