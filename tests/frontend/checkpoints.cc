// SPDX-License-Identifier: Apache-2.0
// Checkpoints of the C++ face, over as many ranks as there are. Each check begins jobs of its own.
//
//     lamina run -n 4 -c frontend_checkpoints
#include <sys/resource.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "lamina/frontend/optimizer_state.h"
#include "tests/frontend/expect.h"
#include "tests/frontend/models.h"
#include "tests/soak.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
namespace fs = std::filesystem;

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> in, hidden, out;
  Child<torch::nn::BatchNorm1d> norm;
  Child<torch::nn::Dropout> drop;
  explicit NetImpl(std::int64_t width = 9) {
    in = register_module("in", torch::nn::Linear(6, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    drop = register_module("drop", torch::nn::Dropout(0.3));
    hidden = register_module("hidden", torch::nn::Linear(width, 5));
    out = register_module("out", torch::nn::Linear(5, 1));
  }
  Tensor forward(const Tensor& x) { return out(torch::tanh(hidden(drop(norm(torch::tanh(in(x))))))); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

auto adamw(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> weights, biases;
  for (const auto& parameter : parameters) (parameter.dim() > 1 ? weights : biases).push_back(parameter);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<torch::optim::AdamWOptions>(1e-2));
  groups.emplace_back(biases, std::make_unique<torch::optim::AdamWOptions>(
                                  torch::optim::AdamWOptions(3e-3).weight_decay(0.5).amsgrad(true)));
  return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1e-2));
}

auto lamb(const std::vector<Tensor>& parameters) {
  return std::make_unique<FusedOptimizer>("LAMB", parameters, HyperValues{{"lr", 1e-2}, {"max_grad_norm", 0.5}});
}

struct Layout {
  int partitions = 1, degree = 1;
  bool shared_states = false, bf16 = false;

  void start() const {
    init({{"ddp", true},
          {"pipeline_parallel_degree", partitions},
          {"microbatches", 2},
          {"deterministic_server", partitions > 1},
          {"sharded_data_parallel_degree", degree},
          {"shard_optimizer_state", shared_states},
          {"sdp_param_persistence_threshold", 10},
          {"sdp_gradient_clipping", 1e9},
          {"bf16", bf16},
          {"timeout_s", 30}});
  }
  std::string text() const {
    return " with " + std::to_string(partitions) + " partitions, degree " + std::to_string(degree) +
           (shared_states ? ", shared states" : "") + (bf16 ? ", bf16" : "");
  }
};

int ranks() {
  const auto* world = std::getenv("WORLD_SIZE");
  return world == nullptr ? 1 : std::atoi(world);
}

// The layouts that so many ranks have.
std::vector<Layout> layouts() {
  if (ranks() == 1) return {{}, {.bf16 = true}};
  if (ranks() == 2) {
    return {
        {.partitions = 2}, {}, {.degree = 2}, {.shared_states = true, .bf16 = true}, {.partitions = 2, .bf16 = true}};
  }
  return {{.partitions = 2},
          {.partitions = 2, .degree = 2, .bf16 = true},
          {.degree = 4},
          {.partitions = 2, .shared_states = true},
          {.shared_states = true, .bf16 = true},
          {.partitions = 4}};
}

// A folder of all ranks of this program, which goes with it.
fs::path folder() {
  static const auto path = fs::temp_directory_path() / ("lamina_checkpoints_" + std::to_string(::getppid()));
  return path;
}

// A job that trains; all that it draws comes of `seed` where no checkpoint says otherwise.
template <class Make>
struct Training {
  Training(const Layout& its_layout, const Make& make, int seed, std::int64_t width = 9)
      : layout(its_layout),
        model((layout.start(), torch::manual_seed(seed), Net(width))),
        optimizer(make(model.parameters())) {
    torch::manual_seed(1000 * seed + rank());
  }
  ~Training() {
    if (is_initialized()) shutdown();
  }
  Training(const Training&) = delete;

  Tensor batch() const { return torch::randn({8, 6}).to(layout.bf16 ? torch::kBFloat16 : torch::kFloat); }
  void train(int steps) {
    const auto step_once =
        step([this](const Tensor& x) { model.backward(model(x).to(torch::kFloat).square().mean()); });
    for (int number = 0; number < steps; ++number) {
      step_once(batch());
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  // Has the model cut, and changes nothing.
  void look() {
    model.eval();
    step([this](const Tensor& x) { return model(x); })(batch());
    model.train();
  }

  Layout layout;
  DistributedModel<Net> model;
  DistributedOptimizer<typename std::invoke_result_t<Make, std::vector<Tensor>>::element_type> optimizer;
};

// Everything that a job has: values of the model, and the optimizer's state.
struct All {
  std::map<std::string, Tensor> values;
  frontend::OptimizerState optimizer;
};

template <class Job>
All all_of(Job& job) {
  All all;
  for (const auto& named : job.model.state_dict()) all.values[named.key()] = named.value().clone();
  torch::serialize::OutputArchive archive;
  job.optimizer.save(archive);
  std::stringstream bytes;
  archive.save_to(bytes);
  torch::serialize::InputArchive saved;
  saved.load_from(bytes);
  all.optimizer = frontend::read(saved);
  return all;
}

bool are_same(const frontend::Fields& a, const frontend::Fields& b) {
  return std::ranges::equal(a, b, [](const auto& one, const auto& other) {
    if (one.first != other.first || one.second.isTensor() != other.second.isTensor()) return false;
    if (!one.second.isTensor()) return one.second == other.second;
    const auto x = one.second.toTensor(), y = other.second.toTensor();
    return x.scalar_type() == y.scalar_type() && torch::equal(x, y);
  });
}

void expect_same(const All& found, const All& expected, const std::string& what) {
  for (const auto& [name, value] : expected.values) expect(torch::equal(found.values.at(name), value), name + what);
  const auto& groups = expected.optimizer.groups;
  const auto& states = expected.optimizer.states;
  const auto& masters = expected.optimizer.masters;
  const auto& other = found.optimizer;
  expect(std::ranges::equal(groups, other.groups,
                            [](const auto& a, const auto& b) {
                              return a.parameters == b.parameters && are_same(a.options, b.options);
                            }),
         "the options of the optimizer" + what);
  expect(states.size() > 0 && std::ranges::equal(states, other.states,
                                                 [](const auto& a, const auto& b) {
                                                   return a.first == b.first && are_same(a.second, b.second);
                                                 }),
         "the optimizer's states" + what);
  expect(std::ranges::equal(
             masters, other.masters,
             [](const auto& a, const auto& b) { return a.first == b.first && torch::equal(a.second, b.second); }),
         "masters" + what);
}

template <class Make>
void goes_on(const Layout& layout, const Make& make, bool asynchronous) {
  const auto what = " goes on" + layout.text();
  All expected;
  {
    Training job(layout, make, 1);
    job.train(2);
    const UserContent content{{"step", 2},
                              {"shape", std::make_tuple(1, 2.5)},
                              {"rates", std::vector<double>{0.1, 0.2}},
                              {"seen", torch::arange(3)},
                              {"name", "first"},
                              {"nothing", c10::IValue()}};
    auto handle = save_checkpoint(folder(), "a", {.user_content = content, .asynchronous = asynchronous});
    expect(asynchronous || handle.done(), "a save has ended when it returns");
    job.train(3);
    handle.wait();
    expect(handle.done(), "a save that was waited for has ended");
    expected = all_of(job);
  }
  Training job(layout, make, 2);
  const auto content = resume_from_checkpoint(folder());
  expect(content.size() == 6 && content.at("step").toInt() == 2 && content.at("name").toStringRef() == "first" &&
             content.at("shape").toTupleRef().elements()[1].toDouble() == 2.5 &&
             content.at("rates").toDoubleVector() == std::vector<double>{0.1, 0.2} && content.at("nothing").isNone() &&
             torch::equal(content.at("seen").toTensor(), torch::arange(3)),
         "the content" + what);
  job.train(3);
  expect_same(all_of(job), expected, what);
}

template <class Make>
void carries(const Layout& from, const Layout& to, const Make& make) {
  All expected;
  {
    Training job(from, make, 1);
    job.train(2);
    save_checkpoint(folder(), "b");
    expected = all_of(job);
  }
  Training job(to, make, 2);
  resume_from_checkpoint(folder(), {.tag = "b"});
  job.look();
  expect_same(all_of(job), expected, " from" + from.text() + " to" + to.text());
  job.train(1);
}

// Masters have what halves have not.
void masters_become_parameters() {
  Layout layout{.bf16 = true};
  std::map<std::string, Tensor> halves;
  {
    Training job(layout, adamw, 1);
    job.train(2);
    save_checkpoint(folder(), "half");
    halves = all_of(job).values;
  }
  Training job(Layout{}, adamw, 2);
  resume_from_checkpoint(folder(), {.tag = "half"});
  const auto found = all_of(job).values;
  const auto& weight = found.at("in.weight");
  expect(!torch::equal(weight, halves.at("in.weight").to(torch::kFloat)), "a master is finer than its parameter");
  expect(torch::equal(weight.to(torch::kBFloat16), halves.at("in.weight")), "and becomes it");
}

void refuses_a_save(const Layout& layout) {
  Training job(layout, adamw, 1);
  if (size_of(Group::kPp) > 1) {
    expect_error<UsageError>([] { save_checkpoint(folder(), "c"); }, {"before the model is partitioned"});
  }
  job.train(1);
  expect_error<UsageError>([] { save_checkpoint(folder(), "a/b"); }, {"a/b"});
  const UserContent content{{"sparse", torch::eye(2).to_sparse()}};
  expect_error<UsageError>([&] { save_checkpoint(folder(), "c", {.user_content = content}); }, {"sparse"});
  expect_error<UsageError>([] { save_checkpoint(folder(), "c", {.num_kept_partial_checkpoints = 0}); },
                           {"num_kept_partial_checkpoints"});
  for (int number = 0; number < 3; ++number) {
    save_checkpoint(folder() / "kept", std::to_string(number), {.num_kept_partial_checkpoints = 2});
  }
  barrier();
  expect(!fs::exists(folder() / "kept/0_partial") && fs::exists(folder() / "kept/1_partial") &&
             fs::exists(folder() / "kept/2_partial"),
         "the latest two are kept");
  save_checkpoint(folder(), "c");
  barrier();
  expect_error<UsageError>([] { resume_from_checkpoint(folder(), {.tag = "d"}); }, {"no checkpoint d"});
  expect_error<UsageError>([] { save_checkpoint(folder(), "red\x1b[31m"); }, {"\"red\\x1b[31m\" is no tag"});
  if (size_of(Group::kWorld) > 1) {
    const bool is_odd = rank() == 1;
    expect_error<UsageError>([&] { save_checkpoint(folder(), is_odd ? "f" : "e", {.partial = !is_odd}); },
                             {"tag is e on rank", " and f on rank 1", "partial is true on rank", "and false on rank 1",
                              "[checkpoint-refused]"});
    expect_error<UsageError>([&] { resume_from_checkpoint(folder(), {.tag = "c", .strict = !is_odd}); },
                             {"strict is true on rank", "and false on rank 1", "[checkpoint-refused]"});
    barrier();
    expect(!fs::exists(folder() / "e_partial") && !fs::exists(folder() / "f"), "something was saved");
  }
  expect_error<UsageError>([] { resume_from_checkpoint(folder() / "none"); }, {"there is no checkpoint in"});
  expect(resume_from_checkpoint(folder() / "none", {.missing_ok = true}).empty(), "there was something to load");
}

void refuses() {
  const Layout layout = layouts().front();
  refuses_a_save(layout);
  const auto unchanged = [](auto& job, const ResumeOptions& options, const std::vector<std::string>& words) {
    job.train(1);
    const auto before = all_of(job);
    expect_error<UsageError>([&] { resume_from_checkpoint(folder(), options); }, words);
    expect_same(all_of(job), before, " is as it was");
    job.train(1);
  };
  {
    Training job(layout, adamw, 2, /*width=*/7);
    unchanged(job, {.tag = "c"}, {"the shape [7, 6] here and [9, 6] in the checkpoint", "[checkpoint-shape]"});
  }
  {
    Training job(layout, lamb, 2);
    unchanged(job, {.tag = "c"}, {"of the class LAMB here and AdamW in the checkpoint"});
    resume_from_checkpoint(folder(), {.tag = "c", .load_optimizer = false});
  }
  {
    const auto one_group = [](const std::vector<Tensor>& parameters) {
      return std::make_unique<torch::optim::AdamW>(parameters, 1e-2);
    };
    Training job(layout, one_group, 2);
    unchanged(job, {.tag = "c"}, {"1 parameter groups here and 2 in the checkpoint"});
  }
  if (layout.partitions == 1) return;
  Training job(layout, lamb, 2);  // not cut: all ranks are told at once
  expect_error<UsageError>([] { resume_from_checkpoint(folder(), {.tag = "c"}); }, {"of the class LAMB"});
}

// A whole model, which another layout loads, and damage that all ranks are told of.
void whole_models_and_damage() {
  std::map<std::string, Tensor> expected;
  const auto all = layouts();
  {
    Training job(all.front(), adamw, 1);
    job.train(2);
    save_checkpoint(folder(), "whole", {.partial = false});
    save_checkpoint(folder() / "damaged", "x");
    expected = all_of(job).values;
    if (rank() == 0) {
      for (const auto& entry : fs::directory_iterator(folder() / "damaged/x_partial")) {
        if (!entry.path().filename().string().starts_with("model-")) continue;
        std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(-2, std::ios::end);
        file.put('!');
      }
    }
    barrier();
    const auto before = all_of(job);
    expect_error<FormatError>([] { resume_from_checkpoint(folder() / "damaged"); }, {"model-"});
    expect_same(all_of(job), before, " is as it was");
  }
  Training job(all[1], adamw, 2);
  resume_from_checkpoint(folder(), {.tag = "whole", .partial = false});
  job.look();
  for (const auto& [name, value] : all_of(job).values) {
    expect(torch::equal(value, expected.at(name).to(value.scalar_type())), name + " of a whole model");
  }
}

// No file of this process becomes larger than 1 MiB while it lives.
class SmallFiles {
 public:
  SmallFiles() {
    std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit small{1 << 20, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~SmallFiles() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_;
};

// All hear of an asynchronous save that fails on one rank: from what comes first of handle, step, save and shutdown.
void failures_are_told_later() {
  Training job(layouts().front(), adamw, 1);
  job.train(1);
  const auto failing = [] {
    std::optional<SmallFiles> small;
    if (rank() == 0) small.emplace();
    const UserContent much{{"much", torch::zeros({1 << 20})}};
    auto handle = save_checkpoint(folder(), "failed", {.user_content = much, .asynchronous = true});
    while (!handle.done()) std::this_thread::yield();
    barrier();
    return handle;
  };
  auto handle = failing();
  expect_error<FileError>([&] { job.train(1); }, {"failed_partial"});
  job.train(1);
  handle = failing();
  expect_error<FileError>([&] { handle.wait(); }, {"failed_partial"});
  save_checkpoint(folder(), "works");
  failing();
  expect_error<FileError>([] { save_checkpoint(folder(), "next"); }, {"failed_partial"});
  failing();
  expect_error<FileError>([] { shutdown(); }, {"failed_partial"});
  expect(!is_initialized(), "the job has ended all the same");
  expect(fs::exists(folder() / "works_partial") && !fs::exists(folder() / "failed_partial"), "what was saved is there");
}

}  // namespace

int main() {
  const auto all = layouts();
  for (std::size_t i = 0; i < all.size(); ++i) {
    goes_on(all[i], adamw, /*asynchronous=*/i % 2 == 1);
    // Into the next layout of its precision; in a soak into all of them.
    for (std::size_t k = i + 1; k < i + all.size(); ++k) {
      const auto& other = all[k % all.size()];
      if (other.bf16 != all[i].bf16) continue;
      carries(all[i], other, adamw);
      if (lamina::test::in_a_soak(false, true)) break;
    }
  }
  goes_on(all.front(), lamb, /*asynchronous=*/true);
  masters_become_parameters();
  refuses();
  whole_models_and_damage();
  failures_are_told_later();
  init();
  barrier();
  if (rank() == 0) fs::remove_all(folder());
  shutdown();
  return exit_code();
}
