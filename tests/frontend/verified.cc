// SPDX-License-Identifier: Apache-2.0
// A program with a fault that only its layout has, as tests/verify/faulty.py has them for Python, with the same names.
//
//     lamina verify -n 2 -c frontend_verified FAULT (pipeline | shards | loop | slices | plan)
//     lamina verify -n 4 -c frontend_verified FAULT sliced_pipeline
#include <cstdlib>

#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

std::string fault;

// True of a fault that is asked for, in the run that is to have it.
bool has(const std::string& kind) { return fault == kind && std::getenv("LAMINA_VERIFY_COLLAPSED") == nullptr; }

struct BlockImpl : torch::nn::Module {
  Child<torch::nn::Linear> linear;
  Child<torch::nn::Dropout> dropout;
  const int number;
  explicit BlockImpl(int number) : number(number) {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
    dropout = register_module("dropout", torch::nn::Dropout(0.1));
  }
  Tensor forward(const Tensor& x) {
    const auto y = dropout(torch::relu(linear(x)));
    return x + (number == 2 && has("output") ? y * 1.001 : y);
  }
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  Child<Sequential> layers;
  Child<torch::nn::Linear> head;
  NetImpl() {
    Sequential blocks;
    for (int number = 0; number < 4; ++number) blocks->push_back(Block(number));
    layers = register_module("layers", blocks);
    head = register_module("head", torch::nn::Linear(kWidth, 4));
  }
  Tensor forward(const Tensor& x) { return head(layers(x)); }
};
TORCH_MODULE(Net);

// A net of torch's layers, which a plan cuts.
struct PlannedImpl : torch::nn::Module {
  Child<torch::nn::Linear> up, down;
  PlannedImpl() {
    up = register_module("up", torch::nn::Linear(kWidth, 6));
    down = register_module("down", torch::nn::Linear(6, kWidth));
  }
  Tensor forward(const Tensor& x) { return x + down(torch::tanh(up(x))) * (has("output") ? 1.001 : 1.0); }
};
TORCH_MODULE(Planned);

void begin(const std::string& kind) {
  if (kind == "pipeline") {
    init({{"partitions", 2}, {"microbatches", 2}});
  } else if (kind == "slices" || kind == "plan" || kind == "sliced_pipeline") {
    init({{"tensor_parallel_degree", 2},
          {"partitions", kind == "sliced_pipeline" ? 2 : 1},
          {"microbatches", 2},
          {"ddp", true},
          {"prescaled_batch", true}});
  } else {
    init({{"ddp", true}, {"sharded_data_parallel_degree", 2}, {"sdp_param_persistence_threshold", 1}});
  }
}

template <class Wrapped, class Loss, class Batch>
void run(const std::string& kind, DistributedModel<Wrapped> model, const Loss& loss_of, const Batch& batch) {
  DistributedOptimizer adam(torch::optim::Adam(model.parameters(), 0.01));
  torch::manual_seed(1 + rdp_rank());
  if (fault == "throws") throw std::runtime_error("the program's own error");
  const auto train = step([&](const Tensor& x) {
    const auto loss = loss_of(model(x), x);
    model.backward(loss);
    return loss;
  });
  for (int number = 0; number < 10; ++number) {
    adam.zero_grad();
    const auto x = batch();
    if (kind == "loop") {
      loss_of(model(x), x).backward();
    } else {
      train(x);
    }
    adam.step();
    if (number == 0 && has("rate")) static_cast<torch::optim::AdamOptions&>(adam.param_groups()[0].options()).lr(0.1);
  }
}

// A language model whose layers are cut.
auto words_model() {
  return nn::DistributedTransformerLMHead(nn::TransformerOptions{.hidden_size = 12,
                                                                 .initializer_range = 0.3,
                                                                 .num_attention_heads = 3,
                                                                 .attention_head_size = 4,
                                                                 .causal_mask_size = 6,
                                                                 .intermediate_size = 10,
                                                                 .num_layers = 2,
                                                                 .vocab_size = 21,
                                                                 .num_positions = 6});
}

}  // namespace

int main(int, char** arguments) {
  fault = arguments[1];
  const std::string kind = arguments[2];
  begin(kind);
  torch::manual_seed(0);
  if (kind == "slices" || kind == "sliced_pipeline") {
    const auto words = words_model();
    const auto loss = [&](const Tensor& scores, const Tensor& labels) { return words->loss(scores, labels); };
    run(kind, DistributedModel(words), loss, [] { return torch::randint(0, 21, {8, 6}); });
  } else {
    const auto loss = [](const Tensor& output, const Tensor&) { return output.pow(2).mean(); };
    const auto batch = [] { return torch::randn({8, kWidth}); };
    if (kind != "plan") {
      run(kind, DistributedModel(Net{}), loss, batch);
    } else {
      Planned net;
      set_tensor_parallelism(*net, {{"up", "colwise"}, {"down", "rowwise"}});
      run(kind, DistributedModel(net), loss, batch);
    }
  }
  std::printf("the program has gone on\n");
  shutdown();
}
