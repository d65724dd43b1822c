// SPDX-License-Identifier: Apache-2.0
// Trains a small GPT to count, over two processes:
//
//     lamina run -n 2 -c train_gpt [STEPS [CHECKPOINTS]]
//
// With a folder of checkpoints it goes on from the newest one there, and saves one at the end. Exits with 1 when the
// loss has not fallen by half, unless it went on.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "examples/cpp/counting.h"
#include "examples/cpp/gpt.h"

int main(int count, char** arguments) {
  const int steps = count > 1 ? std::atoi(arguments[1]) : 100;
  lamina::init({{"partitions", 2}, {"microbatches", 4}});

  torch::manual_seed(0);
  lamina::DistributedModel model(
      example::GPT(/*vocabulary=*/128, /*width=*/64, /*layers=*/4, /*heads=*/4, example::kContext));
  lamina::DistributedOptimizer adamw(torch::optim::AdamW(model.parameters(), torch::optim::AdamWOptions(3e-3)));

  const std::filesystem::path checkpoints = count > 2 ? arguments[2] : "";
  const bool resumes = !checkpoints.empty() && std::filesystem::exists(checkpoints / "newest");
  std::int64_t begin = 0;
  if (resumes) begin = lamina::resume_from_checkpoint(checkpoints).at("step").toInt();

  const auto train = lamina::step([&](const torch::Tensor& x_BL, const torch::Tensor& y_BL) {
    const auto loss = torch::nn::functional::cross_entropy(model(x_BL).flatten(0, 1), y_BL.flatten());
    model.backward(loss);
    return loss;
  });

  const auto bytes = example::text();
  double first = 0, last = 0;
  for (auto step = begin; step < begin + steps; ++step) {
    const auto window = example::batch(bytes);
    const auto loss = train(window.slice(1, 0, example::kContext), window.slice(1, 1)).reduce_mean();
    model.clip_grad_norm_(1.0);
    adamw.step();
    adamw.zero_grad();
    last = loss.item<double>();
    if (step == begin) first = last;
    const bool is_last = step + 1 == begin + steps;
    if (lamina::rank() == 0 && (step % 10 == 0 || is_last)) std::printf("step %ld: loss %.3f\n", step, last);
  }
  if (!checkpoints.empty()) {
    lamina::save_checkpoint(checkpoints, "step" + std::to_string(begin + steps),
                            {.user_content = {{"step", begin + steps}}});
  }
  lamina::shutdown();
  return resumes || last < first / 2 ? 0 : 1;
}
