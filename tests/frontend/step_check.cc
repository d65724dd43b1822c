// SPDX-License-Identifier: Apache-2.0
// A job that compares its first steps, by `verify_steps`: it goes on as without that, and finds what its layout alone
// does.
//
//     lamina run -n (2 | 4) -c frontend_step_check
#include "tests/frontend/expect.h"
#include "tests/frontend/models.h"
#include "tests/frontend/sliced_models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

enum class Fault { kNone, kOutput, kGradient, kWeight, kShared };
Fault fault = Fault::kNone;
int calls = 0;    // of the block that has it, in this step, where the model is called plainly
double left = 0;  // by the first block, which others read from here where that is the fault

// Doubles gradients on their way back.
struct Doubled : torch::autograd::Function<Doubled> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {2 * gradients[0]};
  }
};

// The last rank has the fault. Where it calls the model plainly, too, that is its first call.
bool is_spoiled(bool calls_plainly) {
  if (rank() != size() - 1 || fault == Fault::kNone || fault == Fault::kShared) return false;
  return !calls_plainly || ++calls == 2;
}

Tensor spoiled(const Tensor& y, Tensor weight = {}) {
  if (fault == Fault::kOutput) return y * 1.001;
  if (fault == Fault::kGradient) return Doubled::apply(y);
  weight.register_hook([](const Tensor& gradient) { return 1.5 * gradient; });
  return y;
}

// Draws, and keeps statistics.
struct BlockImpl : torch::nn::Module {
  Child<torch::nn::Linear> linear;
  Child<torch::nn::Dropout> dropout;
  Child<torch::nn::BatchNorm1d> norm;
  const int number;
  explicit BlockImpl(int number) : number(number) {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
    norm = register_module("norm", torch::nn::BatchNorm1d(kWidth));
    dropout = register_module("dropout", torch::nn::Dropout(0.2));
  }
  Tensor forward(const Tensor& x) {
    const auto y = dropout(torch::relu(norm(linear(x))));
    if (number == 0) left = y.mean().item<double>();
    if (number == 2 && fault == Fault::kShared) return x + y * left;
    return x + (number == 2 && is_spoiled(/*calls_plainly=*/pp_size() == 1) ? spoiled(y, linear->weight) : y);
  }
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  Child<Sequential> blocks;
  Child<torch::nn::Linear> head;
  NetImpl() {
    Sequential made;
    for (int number = 0; number < 4; ++number) {
      made->push_back(Block(number));
    }
    blocks = register_module("blocks", made);
    for (int number = 1; pp_size() > 1 && number < 3; ++number) set_partition(*blocks->children()[number], 1);
    head = register_module("head", torch::nn::Linear(kWidth, 3));
  }
  Tensor forward(const Tensor& x) { return head(blocks(x)); }
};
TORCH_MODULE(Net);

// Takes what layers that are cut give to all of their ranks.
struct ScaleImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return is_spoiled(/*calls_plainly=*/false) ? spoiled(x) : x.clone(); }
};
TORCH_MODULE(Scale);

struct TalkImpl : torch::nn::Module {
  Child<nn::DistributedTransformerLMHead> talk;
  Child<Scale> scale;
  TalkImpl() {
    talk = register_module("talk", nn::DistributedTransformerLMHead(gpt(0.1)));
    scale = register_module("scale", Scale());
    if (pp_size() > 1) set_partition(*scale, 1);
  }
  Tensor forward(const Tensor& words) { return talk->loss(scale(talk(words)), words); }
};
TORCH_MODULE(Talk);

enum class Backward { kOfModel, kOfTorch, kPenalty };

struct Trained {
  std::vector<double> losses;
  std::map<std::string, Tensor> state;
};

// Trains; the fault is there in step `at`.
template <class Wrapped, class Batch, class Loss>
Trained train(DistributedModel<Wrapped> model, const Batch& batch, const Loss& loss_of, Fault kind, int at,
              Backward backward = Backward::kOfModel) {
  DistributedOptimizer sgd(torch::optim::SGD(model.parameters(), 0.1));
  torch::manual_seed(1 + rdp_rank());
  const auto train = step([&](const Tensor& x) {
    const auto loss = loss_of(model(x), x);
    if (backward == Backward::kOfTorch) {
      loss.backward();
    } else {
      model.backward(loss);
    }
    if (backward == Backward::kPenalty) (0.1 * model.parameters().back().square().sum()).backward();
    return loss;
  });
  Trained run;
  for (int number = 0; number < 3; ++number) {
    fault = number == at ? kind : Fault::kNone;
    calls = 0;
    sgd.zero_grad();
    run.losses.push_back(train(batch()).reduce_mean().template item<double>());
    sgd.step();
  }
  for (const auto& item : model.state_dict()) run.state[item.key()] = item.value().clone();
  return run;
}

const auto squares = [](const Tensor& scores, const Tensor&) { return scores.pow(2).mean(); };
const auto samples = [] { return torch::randn({8, kWidth}); };

using Keys = std::vector<std::pair<std::string, Setting>>;
std::string json(const Keys& keys, int steps) {
  std::string text = "{\"verify_steps\": " + std::to_string(steps) + ", \"timeout_s\": 60";
  for (const auto& [key, value] : keys) text += ", \"" + key + "\": " + value.json();
  return text + "}";
}

Trained net(const Keys& keys, int steps, Fault kind = Fault::kNone, int at = 0,
            Backward backward = Backward::kOfModel) {
  init(json(keys, steps));
  torch::manual_seed(0);
  return train(DistributedModel(Net()), samples, squares, kind, at, backward);
}

// Trains a model that takes words and gives a loss.
template <class Make>
Trained of_words(const Make& make, const Keys& keys, int steps, Fault kind = Fault::kNone, int at = 0) {
  init(json(keys, steps));
  torch::manual_seed(0);
  const auto words = [] { return torch::randint(0, kWords, {4, kPositions}, torch::kLong); };
  const auto own = [](const Tensor& loss, const Tensor&) { return loss; };
  return train(DistributedModel(make()), words, own, kind, at);
}

Trained talk(const Keys& keys, int steps, Fault kind = Fault::kNone, int at = 0) {
  return of_words([] { return Talk(); }, keys, steps, kind, at);
}

void require_same(const Trained& run, const Trained& plain, const std::string& what) {
  expect(run.losses == plain.losses, what + ": other losses with verify_steps");
  for (const auto& [name, value] : plain.state) expect(run.state.at(name).equal(value), what + ": another " + name);
}

template <class Start>
void refuse(const Start& start, std::vector<std::string> words) {
  words.insert(words.end(), {"this step is not that of the plain model", "[step-differs]"});
  expect_error<UsageError>(start, words);
  shutdown();
}

template <class Start>
Trained ended(const Start& start) {
  auto run = start();
  shutdown();
  return run;
}

void nets(const Keys& keys, const std::string& what, const std::string& rank) {
  require_same(ended([&] { return net(keys, 2); }), ended([&] { return net(keys, 0); }), what);
  ended([&] { return net(keys, 1, Fault::kOutput, 1); });  // which is compared no more
  const auto place = "output of blocks.2 on rank " + rank;
  refuse([&] { net(keys, 1, Fault::kOutput); }, {"step 0", place});
  refuse([&] { net(keys, 2, Fault::kOutput, 1); }, {"step 1", place});
  refuse([&] { net(keys, 1, Fault::kGradient); }, {"step 0", "gradient of"});
}

void talks(const Keys& keys, const std::string& what) {
  require_same(ended([&] { return talk(keys, 2); }), ended([&] { return talk(keys, 0); }), what);
  refuse([&] { talk(keys, 1, Fault::kOutput); }, {"step 0", "output of scale"});
  refuse([&] { talk(keys, 2, Fault::kOutput, 1); }, {"step 1", "output of scale"});
}

// On the one of two ranks that does not call the plain model.
void elsewhere(const Keys& keys) {
  refuse([&] { net(keys, 1, Fault::kWeight); }, {"gradient of blocks.2.linear.weight on rank 1"});
  refuse([&] { net(keys, 1, Fault::kShared); }, {"output of blocks.2 on rank 1"});
  for (const auto backward : {Backward::kOfTorch, Backward::kPenalty}) {  // of which gradients are not compared
    ended([&] { return net(keys, 1, Fault::kNone, 0, backward); });
    refuse([&] { net(keys, 1, Fault::kOutput, 0, backward); }, {"output of blocks.2 on rank 1"});
  }
}

}  // namespace

int main() {
  const Keys pipeline{{"partitions", 2}, {"microbatches", 2}, {"auto_partition", false}, {"default_partition", 0}};
  const auto with = [](Keys keys, const Keys& others) {
    keys.insert(keys.end(), others.begin(), others.end());
    return keys;
  };
  const Keys slices{{"tensor_parallel_degree", 2}, {"ddp", true}, {"prescaled_batch", true}};
  const bool are_two = std::string(std::getenv("WORLD_SIZE")) == "2";
  const Keys shards{
      {"ddp", true}, {"sharded_data_parallel_degree", are_two ? 2 : 4}, {"sdp_param_persistence_threshold", 0}};
  nets(shards, "shards", are_two ? "1" : "3");
  if (are_two) {
    nets(pipeline, "a pipeline", "1");
    elsewhere(pipeline);
    const Keys planned{{"partitions", 2}, {"microbatches", 2}};
    require_same(ended([&] { return net(planned, 2); }), ended([&] { return net(planned, 0); }), "a plan");
    talks(slices, "slices");
    const auto cut = [&](int steps) { return of_words(planned_mixer, slices, steps); };  // which is not compared
    require_same(ended([&] { return cut(2); }), ended([&] { return cut(0); }), "slices by a plan");
  } else {
    nets(with(pipeline, {{"ddp", true}}), "copies of a pipeline", "3");
    talks(with(slices, pipeline), "slices of a pipeline");
  }
  return exit_code();
}
