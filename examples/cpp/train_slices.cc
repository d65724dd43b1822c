// SPDX-License-Identifier: Apache-2.0
// Trains a language model to count. Its layers are cut over two processes, and each has half of them:
//
//     lamina run -n 2 -c train_slices [STEPS]
//
// With `-n 4` there are two copies of it. Exits with 1 when the loss has not fallen by half.
#include <cstdio>
#include <cstdlib>

#include "examples/cpp/counting.h"
#include "lamina/lamina.h"

int main(int count, char** arguments) {
  const int steps = count > 1 ? std::atoi(arguments[1]) : 100;
  lamina::init({{"tensor_parallel_degree", 2}, {"ddp", true}, {"prescaled_batch", true}});

  torch::manual_seed(0);
  const lamina::nn::DistributedTransformerLMHead words(
      lamina::nn::TransformerOptions{.hidden_size = 64,
                                     .hidden_dropout_prob = 0.0,
                                     .pre_layernorm = true,
                                     .post_layernorm = false,
                                     .num_attention_heads = 4,
                                     .attention_head_size = 16,
                                     .attention_dropout_prob = 0.0,
                                     .causal_mask_size = example::kContext + 1,
                                     .intermediate_size = 256,
                                     .num_layers = 4,
                                     .vocab_size = 128,
                                     .num_positions = example::kContext + 1});
  lamina::DistributedModel model(words);
  lamina::DistributedOptimizer adamw(torch::optim::AdamW(model.parameters(), torch::optim::AdamWOptions(1e-3)));

  const auto train = lamina::step([&](const torch::Tensor& x_BL) {
    const auto loss = words->loss(model(x_BL), x_BL);
    model.backward(loss);
    return loss;
  });

  const auto bytes = example::text();
  torch::manual_seed(1 + lamina::rdp_rank());  // ranks with slices of the same layers read the same batch
  double first = 0, last = 0;
  for (int step = 0; step < steps; ++step) {
    last = train(example::batch(bytes)).reduce_mean().item<double>();
    model.clip_grad_norm_(1.0);
    adamw.step();
    adamw.zero_grad();
    if (step == 0) first = last;
    if (lamina::rank() == 0 && (step % 10 == 0 || step + 1 == steps)) std::printf("step %d: loss %.3f\n", step, last);
  }
  lamina::shutdown();
  return last < first / 2 ? 0 : 1;
}
