// SPDX-License-Identifier: Apache-2.0
// The C++ side of tests/python/test_both_faces_state.py: what becomes of the state of an optimizer in each case, as a
// line `case<TAB>outcome` in a file of each rank. Each begins jobs of its own.
//
//     STATES_FOLDER=FOLDER lamina run -n 2 -c frontend_states
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>

#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
using torch::serialize::OutputArchive;

// Keys of the job.
const std::string kPipeline = R"("partitions": 2)";
const std::string kShards = R"("ddp": true, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9)";
const std::string kDivided = R"("ddp": true, "shard_optimizer_state": true)";
const std::string kHalves = kDivided + R"(, "fp16": true)";

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> lower, upper;
  NetImpl() {
    lower = register_module("lower", torch::nn::Linear(4, 6));
    upper = register_module("upper", torch::nn::Linear(6, 2));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(torch::linspace(-1, 1, parameter.numel()).view(parameter.sizes()));
    }
  }
  Tensor forward(const Tensor& x) { return upper(lower(x).tanh()); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;
using Optimizer = DistributedOptimizer<torch::optim::AdamW>;

struct Trained {
  int first = 0;                // the partition of the lower layer
  std::string leaves_out = "";  // a parameter that is not trained
  bool groups_own = false;      // each rank makes the groups of what it owns
};

// One that trains.
struct Job {
  explicit Job(const std::string& keys, const Trained& trained = {})
      : dtype(keys == kHalves ? torch::kHalf : torch::kFloat) {
    init("{" + keys + R"(, "timeout_s": 30})");
    Net net;
    if (keys == kPipeline) {
      set_partition(*net->lower, trained.first);
      set_partition(*net->upper, 1 - trained.first);
    }
    model = std::make_unique<DistributedModel<Net>>(net);
    if (trained.groups_own) compute();
    std::vector<Tensor> parameters;
    for (const auto& named : model->named_parameters()) {
      if (!trained.groups_own && named.key() != trained.leaves_out) parameters.push_back(named.value());
    }
    if (trained.groups_own) {
      for (const auto& [name, own] : model->local_parameters()) parameters.push_back(own);
    }
    const auto scale = keys == kHalves ? LossScale(DynamicLossScale{.init_scale = 256}) : LossScale();
    optimizer = std::make_unique<Optimizer>(
        std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.1)), scale);
    if (trained.groups_own) optimizer->zero_grad();
  }

  void compute() {
    const auto rows = 4 / size_of(Group::kDp);
    const auto x = torch::linspace(0, 1, 16).view({4, 4}).narrow(0, rank_in(Group::kDp) * rows, rows);
    step([&](const Tensor& each) { model->backward((*model)(each).to(torch::kFloat).square().mean()); })(x.to(dtype));
  }
  void train(int steps) {
    for (int number = 0; number < steps; ++number) {
      compute();
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  auto values() {
    auto state = model->state_dict();
    for (auto& named : state) named.value() = named.value().clone();
    return state;
  }
  void load(const std::string& state) {
    std::stringstream bytes(state);
    torch::load(*optimizer, bytes);
  }

  torch::Dtype dtype;
  std::unique_ptr<DistributedModel<Net>> model;
  std::unique_ptr<Optimizer> optimizer;
};

using Form = std::function<void(const Optimizer&, OutputArchive&)>;
const Form whole = [](const Optimizer& optimizer, OutputArchive& archive) { optimizer.save(archive); };
const Form first = [](const Optimizer& optimizer, OutputArchive& archive) { optimizer.save(archive, true); };
const Form parts = [](const Optimizer& optimizer, OutputArchive& archive) { optimizer.save_local(archive); };
const Form joined = [](const Optimizer& optimizer, OutputArchive& archive) { optimizer.save_local(archive, true); };

using Values = torch::OrderedDict<std::string, Tensor>;
struct Saved {
  Values values;
  std::string state;
  Values expected;  // a step later
  bool is_empty = false;
};

// Trains, and saves.
Saved saved(const std::string& keys, const Form& form, const Trained& trained = {}) {
  Job job(keys, trained);
  job.train(2);
  Saved saved;
  saved.values = job.values();
  OutputArchive archive;
  form(*job.optimizer, archive);
  std::stringstream bytes;
  archive.save_to(bytes);
  saved.state = bytes.str();
  torch::serialize::InputArchive again;
  again.load_from(bytes);
  saved.is_empty = again.keys().empty();
  job.train(1);
  saved.expected = job.values();
  shutdown();
  return saved;
}

// Says whether a new job goes on from it.
std::string goes_on(Saved saved, const std::string& keys, bool early = false, int first = 0) {
  Job job(keys, {.first = first});
  if (early) job.load(saved.state);
  job.compute();
  job.optimizer->zero_grad();
  if (!early) job.load(saved.state);
  job.model->load_state_dict(saved.values);
  job.train(1);
  const auto found = job.values();
  shutdown();
  for (const auto& named : found) {
    const auto& expected = saved.expected[named.key()];
    if (!torch::allclose(named.value().to(torch::kFloat), expected.to(torch::kFloat))) return "differs";
  }
  return "goes on";
}

// The state that the other rank has saved, or with shift 0 that of the first.
Saved exchanged(Saved saved, int shift = 1) {
  init();
  const auto name = [](int rank) { return std::string(std::getenv("STATES_FOLDER")) + "/cpp_" + std::to_string(rank); };
  std::ofstream(name(rank()), std::ios::binary) << saved.state;
  barrier();
  std::stringstream bytes;
  bytes << std::ifstream(name(shift == 0 ? 0 : (rank() + 1) % 2), std::ios::binary).rdbuf();
  saved.state = bytes.str();
  barrier();
  shutdown();
  return saved;
}

bool is_first() { return std::string(std::getenv("RANK")) == "0"; }

std::string the_whole_goes_on() { return goes_on(saved(kPipeline, whole), kPipeline); }
std::string the_whole_waits_for_the_cut() { return goes_on(saved(kPipeline, whole), kPipeline, true); }
std::string the_whole_goes_on_in_another_layout() { return goes_on(saved(kPipeline, whole), kShards); }
std::string the_whole_of_groups_of_own_parameters() {
  return goes_on(saved(kPipeline, whole, {.groups_own = true}), kPipeline);
}

std::string the_whole_on_the_first_alone() {
  const auto state = saved(kPipeline, first);
  const std::string others = is_first() || state.is_empty ? "" : "others have it; ";
  return others + goes_on(exchanged(state, 0), kPipeline);
}

std::string parts_go_on() { return goes_on(saved(kPipeline, parts), kPipeline); }
std::string parts_wait_for_the_cut() { return goes_on(saved(kPipeline, parts), kPipeline, true); }
std::string parts_of_another_cut_are_put_together() { return goes_on(saved(kPipeline, parts), kPipeline, false, 1); }
std::string parts_of_another_cut_wait_and_are_put_together() {
  return goes_on(saved(kPipeline, parts), kPipeline, true, 1);
}
std::string parts_of_shards_go_on() { return goes_on(saved(kShards, parts), kShards); }
std::string shards_that_were_joined_go_on() { return goes_on(saved(kShards, joined), kShards); }
std::string joined_ones_of_another_rank_go_on() { return goes_on(exchanged(saved(kDivided, joined)), kDivided); }

std::string masters_and_the_scale_go_on() {
  return goes_on(saved(kHalves, whole), kHalves) + ", " + goes_on(saved(kHalves, parts), kHalves);
}

std::string the_scale_is_the_saved_one() {
  const auto state = saved(kHalves, joined);
  Job job(kHalves);
  for (int number = 0; number < 2; ++number) {
    const auto infinite = torch::full({2, 4}, std::numeric_limits<float>::infinity(), torch::kHalf);
    job.model->backward((*job.model)(infinite).to(torch::kFloat).square().mean());
    job.optimizer->step();
    job.optimizer->zero_grad();
  }
  job.load(state.state);
  return std::to_string(static_cast<int>(job.optimizer->loss_scale()));
}

std::string random_numbers_go_on() {
  const auto keys = kPipeline + R"(, "seed": 3)";
  const auto state = saved(keys, whole);
  Job job(keys);
  job.load(state.state);
  return std::to_string(rng_step());
}

std::string parts_of_another_rank() { return goes_on(exchanged(saved(kDivided, parts)), kDivided); }
std::string parts_where_states_are_whole() { return goes_on(saved(kDivided, parts), R"("ddp": true)"); }
std::string parts_of_more_partitions() { return goes_on(saved(kPipeline, parts), kDivided); }

std::string parts_on_one_rank_and_the_whole_on_another() {
  const auto one = saved(kPipeline, parts), other = saved(kPipeline, whole);
  return goes_on(is_first() ? one : other, kPipeline);
}

std::string parts_that_lack_a_parameter() {
  return goes_on(saved(kPipeline, parts, {.leaves_out = "upper.bias"}), kPipeline);
}

std::string parts_with_one_too_many() {
  const auto state = saved(kPipeline, parts);
  Job job(kPipeline, {.leaves_out = "upper.bias"});
  job.compute();
  job.load(state.state);
  return "";
}

std::string what_does_not_fit_on_one_rank() {
  const auto one = saved(kPipeline, whole, {.leaves_out = "upper.bias"}), other = saved(kPipeline, whole);
  return goes_on(is_first() ? other : one, kPipeline);
}

std::string what_does_not_fit_before_the_cut() {
  return goes_on(saved(kPipeline, whole, {.leaves_out = "upper.bias"}), kPipeline, true);
}

std::string a_save_while_another_one_waits() {
  const auto state = saved(kPipeline, parts);
  Job job(kPipeline);
  job.load(state.state);
  OutputArchive archive;
  job.optimizer->save(archive);
  return "";
}

const std::vector<std::pair<const char*, std::function<std::string()>>> kCases{
    {"the_whole_goes_on", the_whole_goes_on},
    {"the_whole_waits_for_the_cut", the_whole_waits_for_the_cut},
    {"the_whole_goes_on_in_another_layout", the_whole_goes_on_in_another_layout},
    {"the_whole_of_groups_of_own_parameters", the_whole_of_groups_of_own_parameters},
    {"the_whole_on_the_first_alone", the_whole_on_the_first_alone},
    {"parts_go_on", parts_go_on},
    {"parts_wait_for_the_cut", parts_wait_for_the_cut},
    {"parts_of_another_cut_are_put_together", parts_of_another_cut_are_put_together},
    {"parts_of_another_cut_wait_and_are_put_together", parts_of_another_cut_wait_and_are_put_together},
    {"parts_of_shards_go_on", parts_of_shards_go_on},
    {"shards_that_were_joined_go_on", shards_that_were_joined_go_on},
    {"joined_ones_of_another_rank_go_on", joined_ones_of_another_rank_go_on},
    {"masters_and_the_scale_go_on", masters_and_the_scale_go_on},
    {"the_scale_is_the_saved_one", the_scale_is_the_saved_one},
    {"random_numbers_go_on", random_numbers_go_on},
    {"parts_of_another_rank", parts_of_another_rank},
    {"parts_where_states_are_whole", parts_where_states_are_whole},
    {"parts_of_more_partitions", parts_of_more_partitions},
    {"parts_on_one_rank_and_the_whole_on_another", parts_on_one_rank_and_the_whole_on_another},
    {"parts_that_lack_a_parameter", parts_that_lack_a_parameter},
    {"parts_with_one_too_many", parts_with_one_too_many},
    {"what_does_not_fit_on_one_rank", what_does_not_fit_on_one_rank},
    {"what_does_not_fit_before_the_cut", what_does_not_fit_before_the_cut},
    {"a_save_while_another_one_waits", a_save_while_another_one_waits},
};

}  // namespace

int main() {
  torch::set_num_threads(1);
  for (const auto& [name, act] : kCases) {
    std::string outcome;
    try {
      outcome = act();
    } catch (const base::Error& error) {
      outcome = error.what();
      outcome = outcome.substr(0, outcome.find('\n'));
    }
    if (outcome.empty()) outcome = "nothing";
    const std::string rank = std::getenv("RANK");
    std::ofstream(std::getenv("STATES_FOLDER") + ("/cpp_of_" + rank), std::ios::app)
        << name << " on " << rank << "\t" << outcome << "\n";
    shutdown();
  }
}
